"""The one commit of a batch: what it adds up to, the ledger that must balance, and the order of the sinks."""
