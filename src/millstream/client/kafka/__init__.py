"""Logs behind ``kafka://``: our broker or Apache Kafka, through confluent-kafka (the extra ``kafka``).

``log`` has the API. Behind it: ``cluster`` (clients, metadata, administration), ``errors`` (Kafka's errors as
ours), ``fetcher`` and ``reader`` (records of ranges), ``consumer``, ``producer`` and ``transaction``,
``groups``. The library is imported only for an address of brokers.
"""
