"""Aggregates that merge: each is a few partial columns, a way to merge them, and a result.

Read :mod:`.protocol` for what the kernels ask of an aggregate. Each module here is one domain:
counting, sums and means, spread, extremes, order, distribution, sketches, and the user's own.
"""
