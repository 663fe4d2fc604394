"""Views: tables that a job maintains, their change logs, and the commit of a batch to all sinks.

Start with `sink.py`, the contract of a sink and the order of a commit; `commit/` does it. `query.py` is the
contract of a reader, `reader.py` has :func:`millstream.view`. `state_store/` is the app's SQLite store,
`postgres/` reads views in PostgreSQL, `sinks/` are the other sinks, `runs/` is about a run of an app, and
`server/` serves views and the page over HTTP.
"""

from millstream.views import panels

__all__ = ["panels"]
