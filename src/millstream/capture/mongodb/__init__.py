"""Capture from MongoDB: collections, and their changes from change streams.

``source`` is where to start. ``pymongo``, an extra, carries the bytes and decodes BSON.
"""
