"""Session windows: how events merge into sessions, and the panes that sessions emit."""
