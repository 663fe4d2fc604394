"""Share groups (KIP-932): members, sessions, share partitions and their dead-letter queue."""
