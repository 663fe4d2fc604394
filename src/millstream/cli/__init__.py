"""The ``millstream`` command. Start reading at ``main.py``; each command has a module of its name."""
