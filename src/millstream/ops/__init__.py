"""Running pipelines in the long term: what they cost, what they did, and what they need."""
