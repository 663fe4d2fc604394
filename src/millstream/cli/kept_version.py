"""What commands say of the version of an app that is kept to go back to."""

from __future__ import annotations

from datetime import datetime


def kept_sentence(until: datetime) -> str:
    """Say how long the version before the last deployment is kept."""
    return (
        f"The version before the last deployment is kept until {until:%Y-%m-%d %H:%M} UTC: millstream rollback goes back "
        "to it."
    )
