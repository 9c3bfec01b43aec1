"""Images and videos: towers that turn pixels into rows of a prompt, and the positions of these rows."""
