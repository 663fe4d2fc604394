"""The log in a folder: the same cast of modules as client.kafka."""
