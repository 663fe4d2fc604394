"""Operating pipelines: why windows are open and events late, dead letters, resets, and a check of the machine."""
