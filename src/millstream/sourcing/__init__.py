"""Event sourcing: commands are decided on the state of an aggregate, and the log keeps what happened.

Read ``decider`` first, then ``store``. ``command_queue`` brings the commands of all threads together; ``lane`` decides
them, one lane for each partition; ``folder_partition`` and ``kafka_partition`` are the two ways in which an append is
refused when another writer was first. ``stream_index`` finds an aggregate's events without a scan. docs/sourcing.md is
for users.
"""
