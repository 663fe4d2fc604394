"""Captured changes, applied to other stores: PostgreSQL, SQLite, lakes of Parquet files, Redis, a full-text index.

:mod:`millstream.capture.apply.run` is the loop, ``change_stream`` gives whole transactions of the source in their
order, ``batch_writer`` makes the last state of each key of them, and ``target`` says what a store promises.
"""
