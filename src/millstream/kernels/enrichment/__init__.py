"""Enrichment by a lookup outside: answers of a service or database, asked once per key and kept."""
