"""A run of an app: its progress and report, alarms, failures, and the files that control it."""
