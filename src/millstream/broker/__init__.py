"""The Kafka protocol in front of a log: any Kafka client reads and writes the folder.

Read in this order: ``wire`` (bytes), ``schema`` and ``messages`` (what each message holds),
``connection`` and ``server`` (who is talked to), ``dispatch`` (which code answers what), then the
answers by what they are about: ``producing``, ``fetching``, ``listing``, ``topics``, ``configs``,
``groups``, ``committed``, ``transactions``. What the broker speaks, refuses and promises is told in
``docs/broker.md``.
"""
