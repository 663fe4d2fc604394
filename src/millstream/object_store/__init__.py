"""Immutable objects by name: files of a folder, or objects of S3, Google Cloud Storage and Azure."""
