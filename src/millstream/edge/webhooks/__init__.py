"""Webhooks: the records of a topic are delivered to an address, each until it is taken or given up.

``delivering`` does it, with ``endpoint`` (one request and its answer), ``retrying`` (what an answer
means, and when to try again), ``signing``, ``progress`` (what may be committed) and ``undelivered`` (what
was given up). Of several for one group one is on ``duty``; ``shifts`` delivers while it is.
"""
