"""Windows of time, of counts and up to each event: which there are, and the operators that aggregate them."""
