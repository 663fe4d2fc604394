"""Two processes, one folder: the owner appends, and every other process sends its requests to it."""
