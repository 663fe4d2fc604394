"""Views in PostgreSQL: connection, tables, values, and the reader. The sink: `views/sinks/postgres.py`."""
