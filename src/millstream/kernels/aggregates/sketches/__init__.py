"""Approximate results from sketches: little state, and an error that is stated.

Sketches are Apache DataSketches', by the package ``datasketches`` (the extra ``sketches``), and their
bytes are those that Spark's functions of the same names write and read: ``hll_sketch_agg``,
``kll_sketch_agg_double``, and their kind. A sketch of no values is a sketch, and not null. Sketches
cannot take values back.
"""
