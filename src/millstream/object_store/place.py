"""Where an app's runs of state are: in its folder, or under a URL. The one module that tells them apart."""

from __future__ import annotations

import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millstream.errors import ConfigError, RetriableError
from millstream.object_store.address import ObjectUrl, parse_state_url
from millstream.object_store.cache import SIZE_DEFAULT, default_cache_folder
from millstream.object_store.cached import CachedObjectStore
from millstream.object_store.folder import FolderStore
from millstream.object_store.store import ObjectStore

CACHE_FOLDER = "MILLSTREAM_CACHE"
CACHE_BYTES = "MILLSTREAM_CACHE_BYTES"
DESCRIPTION = "state"  # in the state store: where the runs are that its manifests name


@dataclass(frozen=True)
class StatePlace:
    """Where runs of state are, for every process of a job; it has no credentials.

    ``prefix`` belongs to one state store, so that two apps of one name do not meet under one URL.
    """

    url: ObjectUrl
    prefix: str

    @property
    def text(self) -> str:
        """The URL of the place."""
        return f"{self.url.text}/{self.prefix}"

    def open(self, part: str = "") -> ObjectStore:
        """Open what is there, or a part of it such as ``runs``.

        Raises:
            ConfigError: the environment's size of the cache is no number.
        """
        inner = f"{self.prefix}/{part}" if part else self.prefix
        if self.url.folder is not None:
            return FolderStore(self.url.folder / inner)
        named = os.environ.get(CACHE_FOLDER)
        folder = Path(named) if named else default_cache_folder()
        return CachedObjectStore.open(f"{self.url.text}/{inner}", folder, _cache_bytes())

    def to_message(self) -> dict[str, str]:
        """Return what the state store keeps of it."""
        return {"url": self.url.text, "prefix": self.prefix}

    @classmethod
    def from_message(cls, message: Any) -> StatePlace | None:
        """Return the place that a state store keeps; None if the runs are in the app's folder."""
        if not message:
            return None
        return cls(parse_state_url(message["url"]), message["prefix"])


def new_place(app: str, url: ObjectUrl) -> StatePlace:
    """Return a place under a URL that nothing else has."""
    return StatePlace(url, f"apps/{app}/{uuid.uuid4().hex[:16]}")


def remove_place(place: StatePlace) -> None:
    """Delete all objects of a place. It can be repeated.

    Raises:
        RetriableError: some may be left.
    """
    try:
        place.open().delete_all()
    except OSError as error:
        raise RetriableError(
            f"{place.text} could not be removed whole: {error}. Correct that, and reset the app again."
        ) from error


def _cache_bytes() -> int:
    text = os.environ.get(CACHE_BYTES, "")
    if not text:
        return SIZE_DEFAULT
    if not text.isdecimal():
        raise ConfigError(
            f"{CACHE_BYTES} is {text!r}. Give a number of bytes, such as {SIZE_DEFAULT}."
        )
    return int(text)
