"""The stateful stages of a batch: their execution, on the driver or in workers, and their state files."""
