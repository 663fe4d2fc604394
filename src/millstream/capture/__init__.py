"""Changes of databases, captured into the log."""
