"""Who may do what: tokens with roles, certificates, secrets that are named instead of written, and the audit log.

Below every server of ours: they ask :mod:`millstream.access.tokens` who sends a request, and it knows nothing of them.
"""
