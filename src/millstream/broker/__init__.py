"""The Kafka protocol in front of a log: any Kafka client reads and writes the folder.

Read in this order: ``protocol/`` (bytes, structs, messages, error codes), ``server`` and ``connection``,
``dispatch`` (which handler handles which request), ``requests/`` (the handlers, by subject), ``node`` (what
they share), then ``groups/`` (consumer groups), ``share/`` (share groups), ``security/`` (TLS and users) and
``records/`` (validation and appending of batches). ``docs/broker.md`` describes what the broker supports,
rejects and guarantees.
"""
