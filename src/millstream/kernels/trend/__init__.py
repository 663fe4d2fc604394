"""Results of windows beside earlier ones, and alerts on them."""
