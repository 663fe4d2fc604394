"""Views in PostgreSQL: the connection, tables, values, and the reader. The sink: `views/sinks/postgres.py`."""
