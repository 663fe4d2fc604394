"""The edge of a log: events come in over HTTP and UDP, and go out over HTTP, without a client library.

``serving`` puts it together: ``routes`` answers HTTP, with ``incoming`` (bodies as events), ``appending``
(events into the log, acknowledged) and ``streams`` (records as server-sent events); ``datagrams``
listens for StatsD. ``webhooks`` carries the records of a topic to an address of somebody else's. What
each promises is told in ``docs/edge.md``.
"""
