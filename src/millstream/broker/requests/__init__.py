"""One module for each family of requests, with their handlers."""
