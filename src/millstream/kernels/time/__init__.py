"""Event time before and behind the shuffle: watermarks, producers, times of arrival, order of the log."""
