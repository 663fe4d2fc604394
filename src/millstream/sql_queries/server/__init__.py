"""PostgreSQL's protocol, version 3, in front of the tables of an app."""
