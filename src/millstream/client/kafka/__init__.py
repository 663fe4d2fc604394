"""Logs behind ``kafka://``: our broker or Apache Kafka, through confluent-kafka (the extra ``kafka``).

``log`` is the face. Behind it: ``address`` (what the URL says), ``cluster`` (clients, metadata,
administration), ``errors`` (whose errors become ours), ``fetcher`` and ``reader`` (records of ranges),
``consumer``, ``producer`` and ``transaction``, ``groups``. Only ``cluster``, ``errors`` and
what they hand out touch the library, and nothing imports it before an address asks for it.
"""
