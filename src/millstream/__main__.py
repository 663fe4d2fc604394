"""``python -m millstream``: the command, where its script is not on the PATH."""

from __future__ import annotations

from millstream.cli.main import main

if __name__ == "__main__":
    main()
