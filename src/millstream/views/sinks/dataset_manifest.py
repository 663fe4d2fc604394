"""A dataset's manifest: the one file that says which Parquet files are the dataset, and whose it is.

``_manifest.json`` is replaced as a whole, by a rename, so that at any moment it is that of one commit (under a
URL, manifests are numbered: see ``dataset_url.py``). It holds the identity of the dataset, its columns, the fence of the last batch, the files with their row
counts, and the files that a merge has replaced, which stay for active readers.

A dataset belongs to one job. A writer holds the lock of its folder.
"""

from __future__ import annotations

import base64
import fcntl
import io
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import polars as pl

from millstream.errors import ConfigError, CorruptionError
from millstream.log.files import DISK, Files, replace_file
from millstream.views.coverage import CoverageSpan

FILE = "_manifest.json"
_LOCK = "_lock"
_FORMAT = 4
_OLDEST_FORMAT = 3  # files without a size, and no datasets that were deleted


@dataclass(frozen=True)
class DataFile:
    """One Parquet file: its path within the dataset, its rows, and its values of partition_by."""

    path: str
    rows: int
    partition: str  # the folder, as in day=2026-01-31
    memory_bytes: int = 0  # of its rows, once read; 0 in a manifest of an earlier version


@dataclass(frozen=True)
class ReplacedFile:
    """A file whose rows are in another one since a time (milliseconds since 1970)."""

    path: str
    since_ms: int


@dataclass(frozen=True)
class DatasetFence:
    """The last batch of the newest run; ``batch_id`` is None before the first."""

    app: str
    job: str
    run: int
    checkpoint_id: str
    batch_id: int | None = None


@dataclass(frozen=True)
class Manifest:
    """What a dataset consists of. ``columns`` is an Arrow IPC stream without rows, as base64.

    ``coverage`` are the spans that the dataset covers. ``deleted`` begins the identities of datasets that were there
    before, and were deleted: see ``dataset_url.py``.
    """

    identity: str
    columns: str
    partition_by: tuple[str, ...]
    fence: DatasetFence | None = None
    files: tuple[DataFile, ...] = ()
    replaced: tuple[ReplacedFile, ...] = field(default=())
    coverage: tuple[CoverageSpan, ...] = ()
    deleted: tuple[str, ...] = ()

    @property
    def schema(self) -> pl.Schema:
        """The columns of every file, and ``_diff`` if there are retractions."""
        return pl.read_ipc_stream(io.BytesIO(base64.b64decode(self.columns))).schema

    def to_json(self) -> str:
        return json.dumps({"format": _FORMAT, **asdict(self)}, indent=1)


def encode_columns(schema: dict[str, pl.DataType]) -> str:
    """Return columns in the form in which a manifest keeps them."""
    buffer = io.BytesIO()
    pl.DataFrame(schema=schema).write_ipc_stream(buffer)
    return base64.b64encode(buffer.getvalue()).decode("ascii")


def read_manifest(folder: Path) -> Manifest | None:
    """Return a dataset's manifest; None where there is none.

    Raises:
        ConfigError: it is of another version.
        CorruptionError: it is damaged.
    """
    path = folder / FILE
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    return parse_manifest(data, path)


def parse_manifest(data: bytes, path: Path | str) -> Manifest:
    """Return the manifest that :meth:`Manifest.to_json` wrote; ``path`` is where it is, for messages.

    Raises:
        ConfigError: it is of another version.
        CorruptionError: it is damaged.
    """
    try:
        values = json.loads(data)
        version = values.pop("format")
    except (ValueError, KeyError, AttributeError) as error:
        raise _damaged(path, error) from error
    if version > _FORMAT:
        raise ConfigError(
            f"{path} has format {version}; this version reads {_FORMAT}. Upgrade millstream."
        )
    if version < _OLDEST_FORMAT:
        raise ConfigError(
            f"{path} has format {version}, of an earlier version; this one reads {_OLDEST_FORMAT} and {_FORMAT}. Go "
            "on with that version, or give the output another folder."
        )
    try:
        fence = values.pop("fence")
        return Manifest(
            partition_by=tuple(values.pop("partition_by")),
            fence=None if fence is None else DatasetFence(**fence),
            files=tuple(DataFile(**one) for one in values.pop("files")),
            replaced=tuple(ReplacedFile(**one) for one in values.pop("replaced")),
            coverage=tuple(map(CoverageSpan.from_json, values.pop("coverage"))),
            deleted=tuple(values.pop("deleted", ())),
            **values,
        )
    except (KeyError, TypeError) as error:
        raise _damaged(path, error) from error


def _damaged(path: Path | str, error: Exception) -> CorruptionError:
    return CorruptionError(
        f"{path} is damaged ({error}). Keep it and restore it from a backup; without it, nobody can "
        "tell which files are the dataset."
    )


def write_manifest(folder: Path, manifest: Manifest, files: Files = DISK) -> None:
    """Replace a dataset's manifest, durably; a crash leaves the one before or this one."""
    replace_file(files, folder / FILE, manifest.to_json().encode())


@contextmanager
def dataset_lock(folder: Path) -> Iterator[None]:
    """Wait for the lock of a dataset, and hold it until the block ends. A crash releases it."""
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
