"""Views over HTTP, and the page: queries, subscriptions, and what a pipeline is doing, live.

It reads only, from the stores that jobs write, and holds up none of them. What can be asked is in
`routes.py`; :func:`millstream.serve` starts it, in a thread of its own. It needs the extra
`ui` (starlette and uvicorn), which is not loaded before.
"""
