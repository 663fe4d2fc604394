"""Stateful stages of a batch: which run on the driver and which in workers, and the files of their state."""
