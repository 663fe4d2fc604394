"""The app's state store in SQLite: views, change logs, position, ledger, fence and state, in one commit."""
