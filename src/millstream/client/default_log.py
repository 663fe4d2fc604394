"""The default log: one rule for the Python API and for every command."""

from __future__ import annotations

import os
from pathlib import Path

LOG_VARIABLE = "MILLSTREAM_LOG"
DEFAULT_FOLDER = "./data"


def default_log() -> str | Path:
    """Return the address in the environment variable MILLSTREAM_LOG, or else the folder ``./data``."""
    return os.environ.get(LOG_VARIABLE) or Path(DEFAULT_FOLDER)
