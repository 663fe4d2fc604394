"""Views over HTTP, and the page: queries, subscriptions, and the status of apps, live.

The server only reads the stores that jobs write, and blocks no job. `routes.py` lists the addresses;
:func:`millstream.serve` starts the server in a thread. It needs the extra `ui` (starlette and uvicorn),
which is loaded only then.
"""
