"""Connectors: what reads folders, generators, brokers of messages and caches into topics of the log.

``connector`` is the protocol that a connector fulfils, ours or another's; ``source`` runs one. ``docs/connectors.md`` has
what each promises; ``millstream.testing.connectors`` is the suite of tests that holds it to that.
"""
