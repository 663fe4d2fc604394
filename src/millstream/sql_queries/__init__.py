"""SQL over the views and topics of an app: read only, each statement at one committed position.

`app_tables.py` reads the tables that a statement names, `session.py` runs it on DuckDB, `query.py` is for Python,
and `server/` speaks PostgreSQL's protocol.
"""
