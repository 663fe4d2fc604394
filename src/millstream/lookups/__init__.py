"""Lookups that are ready for ``stream.enrich``: a service by HTTP, a database by SQL.

They are declared on the driver, and bound there to the columns of the key and of the answer. What is bound
travels to the processes that ask. It has no open connection: these are kept in each process (`idle.py`).
Secrets travel with it, and are in no text: no definition, ``repr``, error or state.
"""
