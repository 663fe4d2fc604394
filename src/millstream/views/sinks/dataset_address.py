"""Addresses of datasets: a folder, or a URL."""

from __future__ import annotations

from pathlib import Path

from millstream.log.files import DISK, Files
from millstream.object_store.address import is_url, parse_url
from millstream.views.sinks.dataset_folder import FolderPlace
from millstream.views.sinks.dataset_place import DatasetPlace
from millstream.views.sinks.dataset_url import UrlPlace


def place_of(address: str | Path, disk: Files = DISK) -> DatasetPlace:
    """Return the place of an address; a folder may have a URL, too.

    Raises:
        ConfigError: no object store has such URLs.
    """
    if not is_url(address):
        return FolderPlace(Path(address).absolute(), disk)
    url = parse_url(str(address), "The dataset's URL")
    return UrlPlace(url.text) if url.folder is None else FolderPlace(url.folder, disk)
