"""The streaming source: plans batches over the log, and reads their splits in the workers."""
