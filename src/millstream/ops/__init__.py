"""Operating pipelines: open windows and late events explained, dead letters, resets, a check of the machine."""
