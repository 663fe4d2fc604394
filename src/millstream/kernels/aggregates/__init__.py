"""Aggregates that merge: each is a few partial columns, a way to merge them, and a result.

Read :mod:`.protocol` for what the kernels ask of an aggregate. The aggregates are in ``count``, ``sums``,
``variance``, ``extremes``, ``event_order``, ``distribution``, ``sketches`` and ``user_defined``; the other
modules are what these share.
"""
