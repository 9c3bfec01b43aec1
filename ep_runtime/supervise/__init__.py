"""Process supervision, coordinator and membership. Imports no torch; starts engines by module name."""
