"""Process functions: the user's code for each row and timer of a key, with state of its own."""
