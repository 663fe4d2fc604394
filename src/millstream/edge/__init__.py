"""The edge of a log: events in over HTTP and UDP, records out over HTTP, without a client library.

``server`` starts it. ``http/routes.py`` handles HTTP, with ``http/request_body.py`` (bodies as events),
``http/appender.py`` (events into the log, acknowledged) and ``http/event_streams.py`` (records as
server-sent events). ``statsd/listener.py`` receives StatsD. ``webhooks`` delivers the records of a topic to
an endpoint. ``docs/edge.md`` says what each promises.
"""
