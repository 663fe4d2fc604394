"""Addresses of MongoDB deployments, ``mongodb://user@host:27017/database?options``: parsed, and shown without secrets."""

from __future__ import annotations

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from millstream.errors import ConfigError

MONGODB_SCHEMES = ("mongodb", "mongodb+srv")


@dataclass(frozen=True, slots=True)
class MongoDbAddress:
    """Where a deployment is, who asks it, and the database. ``shown`` has neither user nor password."""

    url: str = field(repr=False)
    shown: str
    database: str
    user: str = field(repr=False, default="")
    password: str = field(repr=False, default="")

    def redacted(self, text: str) -> str:
        """Return a text, such as a server's message, without the password."""
        return text.replace(self.password, "***") if self.password else text


def mongodb_address(url: str) -> MongoDbAddress:
    """Parse a URL.

    Raises:
        ConfigError: it is not a URL of MongoDB, or has no host or database. The message never has the password.
    """
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    who, _, hosts = parts.netloc.rpartition("@")
    database = unquote(parts.path.removeprefix("/"))
    if parts.scheme not in MONGODB_SCHEMES or not hosts or not database or "/" in database:
        raise ConfigError(
            "the address of a MongoDB database is not one that can be read. Give it as "
            "mongodb://user@host:27017/database, with options behind ?, and characters such as @ : / % in user and "
            "password written as %40 %3A %2F %25."
        )
    user, _, password = who.partition(":")
    shown = f"{parts.scheme}://{hosts}/{database}"
    return MongoDbAddress(url, shown, database, unquote(user), unquote(password))
