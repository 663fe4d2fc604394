"""The sinks besides the state store: PostgreSQL, topics, datasets, and functions of the user's."""
