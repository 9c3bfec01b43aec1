"""HTTP endpoints, one file a family, with the models of their requests and answers."""
