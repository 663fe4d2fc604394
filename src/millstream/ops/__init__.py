"""Operating pipelines: dead letters, resets, checks of the machine; why events are late or windows open."""
