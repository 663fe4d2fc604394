"""Windows by time, by count and up to each event, and the operators that aggregate them."""
