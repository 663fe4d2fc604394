"""The log in a folder: modules of the same names as in client.kafka."""
