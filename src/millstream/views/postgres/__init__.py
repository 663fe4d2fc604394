"""Views in PostgreSQL, for readers: the connection, tables, values, and the reader."""
