"""HTTP: parsing requests, appending events, records as server-sent events, and access control."""
