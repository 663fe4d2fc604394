"""Deduplication: ids that were seen, exactly and in Bloom filters."""
