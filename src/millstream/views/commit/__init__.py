"""The commit of a batch: its result, its ledger, and the order in which its sinks commit."""
