"""A run of an app, for whoever watches it: progress, alarms, how it ended, and asking it to stop."""
