"""One transaction whose records several processes send: the driver begins and ends it, tasks send.

Kafka's protocol ties the records of a transaction to a producer id, a producer epoch and sequences, and not to
a connection. Clients that exist keep these to themselves, so this is a producer of our own, with the codecs of
our broker: ``producer`` begins and ends transactions, ``sender`` sends the records of one partition,
``brokers`` finds leaders and coordinators, ``connection`` is one connection and ``security`` its TLS and SASL.
"""
