"""State of operators: sorted runs under a manifest, rows by key, timers, and the ledger over them."""
