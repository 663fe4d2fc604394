"""Webhooks: the records of a topic are delivered to an endpoint, each until it is delivered or dead-lettered.

``delivery`` does it, with ``endpoint`` (one request and its response), ``retry_policy`` (what a response
means, and when to retry), ``signature``, ``offset_tracker`` (what may be committed) and
``dead_letter_writer``. Of several webhooks of one group one holds the ``leader_lease``; ``runner`` delivers
while it does.
"""
