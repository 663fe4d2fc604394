"""Authentication and TLS: users, SASL/PLAIN, certificates."""
