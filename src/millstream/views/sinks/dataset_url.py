"""A dataset under a URL: objects of an object store, which has no lock and no rename.

Manifests are numbered, ``_manifests/00000000000000000007.json``, and the one with the highest number counts. A
writer puts the number after that of the manifest that it has read, and only if nobody else has put it.

=====================================  ==========================================================
a crash, or a writer that is replaced  leaves
after
=====================================  ==========================================================
1. the batch's files are put           files that no manifest names: nobody reads them, and a later
                                       run removes them
2. the next manifest is put, if its    the old manifest or the new one, whole, with its fence: a
   number is free                      put is one request, so a torn one leaves nothing
3. manifests are listed: this one is   the batch is done, and this run does not know
   the newest
4. manifests before the last few are   some of them are left; the next commit removes them
   removed
=====================================  ==========================================================

An old writer that wakes up finds its number taken. If it is so old that its number was removed, its manifest is not
the newest when it looks (step 3): nobody reads it, and the writer is refused.

The name of a file has the dataset and the run that wrote it. A run removes only what earlier runs have left, so what a newer
one has just put, and not named yet, is safe from it. What an old run puts after that is for the run after. A dataset that
begins where another was deleted knows of it, and removes what runs of that one have put since.

All of this needs listings that have every object whose put has been answered, as S3's have since 2020.

Source: the numbered manifests of SlateDB, and Delta Lake's log (Armbrust et al., PVLDB 13(12), 2020), both of which
rely on a conditional put.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

import polars as pl
from polars.io.plugins import register_io_source

from millstream.errors import ConfigError, CorruptionError
from millstream.object_store.client import ObjectClient
from millstream.views.sinks.dataset_files import in_partition_folder
from millstream.views.sinks.dataset_manifest import Manifest, parse_manifest
from millstream.views.sinks.dataset_place import ManifestReplacedError

_MANIFESTS = "_manifests/"
_MANIFEST = re.compile(rf"{_MANIFESTS}(\d{{20}})\.json")
_FILE = re.compile(
    r"(?:[^/]*=[^/]*/)*\d{12,}-(?P<dataset>[0-9a-f]{8})-(?P<run>\d{8,})-[0-9a-f]{12}\.parquet"
)
_DELETED = b'{"deleted": '  # so begins a manifest that says that there is no dataset any more
_DELETED_MAX = 64  # datasets before, of which a manifest knows
_ID_CHARACTERS = 8  # of a dataset's identity, in the names of its files
_KEPT = 8  # manifests besides the newest, for whoever has just listed them
_READS_MAX = 10  # of a manifest that is removed between the list and the read
_MERGED_TIERS = (
    4  # files of 4,096 rows and more stay as they are: a merged one is put in one request
)


@dataclass
class UrlPlace:
    """A dataset under a URL. One process uses it at a time."""

    url: str
    client: ObjectClient = field(init=False)
    merged_tiers: int = _MERGED_TIERS
    _number: int = 0  # of the manifest that was read last
    _deleted: tuple[str, ...] = ()  # what it says of datasets before

    def __post_init__(self) -> None:
        self.client = ObjectClient(self.url)

    @property
    def text(self) -> str:
        return self.url

    def lock(self) -> AbstractContextManager[None]:
        return nullcontext()

    # ── the manifest ────────────────────────────────────────────────────────────────────────

    def create(self, fresh: Manifest) -> None:
        while self.read() is None:
            foreign = next((name for name in self.client.names() if name[0] not in "._"), None)
            if foreign is not None and not self._number:
                raise ConfigError(
                    f"{self.url} holds {foreign!r} and is no dataset of Millstream. Give another URL."
                )
            try:
                self.write(replace(fresh, deleted=self._deleted))
            except ManifestReplacedError:
                continue  # another run has made it

    def read(self) -> Manifest | None:
        for _ in range(_READS_MAX):
            self._number = max(self._numbers(), default=0)
            if not self._number:
                return None
            name = _manifest_name(self._number)
            try:
                data = self.client.get(name).to_pybytes()
            except FileNotFoundError:  # replaced since, and removed
                continue
            return self._parse(data, name)
        raise CorruptionError(
            f"The newest manifest of {self.url} is listed, and can't be read: {name}. Restore it from a backup."
        )

    def _parse(self, data: bytes, name: str) -> Manifest | None:
        if not data.startswith(_DELETED):
            return parse_manifest(data, f"{self.url}/{name}")
        found = json.loads(data)["deleted"]
        self._deleted = tuple(found) if isinstance(found, list) else ()  # once it said only: true
        return None

    def write(self, manifest: Manifest) -> None:
        self._put_manifest(manifest.to_json().encode())

    def _put_manifest(self, data: bytes) -> None:
        own = self._number + 1
        try:
            self.client.put(_manifest_name(own), memoryview(data))  # step 2
        except FileExistsError:
            raise ManifestReplacedError from None
        numbers = self._numbers()
        if max(numbers, default=0) != own:  # step 3
            raise ManifestReplacedError
        self._number = own
        old = [_manifest_name(number) for number in numbers if number < own - _KEPT]
        if old:
            self.client.delete(old)  # step 4

    def _numbers(self) -> list[int]:
        found = map(_MANIFEST.fullmatch, self.client.names(_MANIFESTS))
        return [int(match[1]) for match in found if match]

    # ── files ───────────────────────────────────────────────────────────────────────────────

    def stamp(self, manifest: Manifest, run: int) -> str:
        return f"{manifest.identity[:_ID_CHARACTERS]}-{run:08}-"

    def put(self, path: str, data: bytes) -> None:
        self.client.put(path, memoryview(data))

    def size_bytes(self, path: str) -> int | None:
        return self.client.size(path)

    def open_file(self, path: str) -> Path | bytes:
        data: bytes = self.client.get(path).to_pybytes()
        return data

    def remove(self, paths: Iterable[str]) -> None:
        names = list(paths)
        if names:
            self.client.delete(names)

    def files(self, manifest: Manifest, before_run: int | None = None) -> dict[str, int]:
        found = {}
        own = manifest.identity[:_ID_CHARACTERS]
        for name, size_bytes in self.client.objects():
            match = _FILE.fullmatch(name)
            if match is None:
                continue
            if match["dataset"] == own:
                is_old = before_run is None or int(match["run"]) < before_run
                is_left = is_old and in_partition_folder(name, manifest.partition_by)
            else:
                is_left = match["dataset"] in manifest.deleted
            if is_left:
                found[name] = size_bytes
        return found

    def scan(self, paths: Sequence[str], schema: pl.Schema, *, some_lack: bool) -> pl.LazyFrame:  # noqa: ARG002
        return register_io_source(_RowReader(self.url, tuple(paths), schema), schema=schema)

    def address_of(self, path: str) -> Path | str:
        return f"{self.url}/{path}"

    def delete(self, identity: str) -> None:
        """Delete the dataset; nothing if it is another one.

        1. A manifest without files and fence is put: a running job is refused, readers see no rows. It
           keeps the identity, so that a repetition after a crash finds the dataset.
        2. The files are removed. A crash leaves some of them.
        3. A last manifest says that there is no dataset, and which there was. It stays, and so does its number: an
           old writer that puts the next one would find it free otherwise. The others are removed, or some are left.

        An old writer may put files at any time after that. The next dataset here removes them, as it begins each run.

        Raises:
            ManifestReplacedError: somebody writes to it.
        """
        manifest = self.read()
        if manifest is None or manifest.identity != identity:
            return
        # Listed first: a run that begins after the first manifest names none of these.
        files = self.files(manifest)
        self.write(replace(manifest, fence=None, files=(), replaced=()))
        self.remove(files)
        deleted = [*manifest.deleted, identity[:_ID_CHARACTERS]][-_DELETED_MAX:]
        self._put_manifest(json.dumps({"deleted": deleted}).encode())
        self.remove(_manifest_name(number) for number in self._numbers() if number < self._number)


def _manifest_name(number: int) -> str:
    return f"{_MANIFESTS}{number:020}.json"


@dataclass(frozen=True)
class _RowReader:
    """Yields the rows of files, one after the other, each read in one request: polars calls it when it collects."""

    url: str
    paths: tuple[str, ...]
    schema: pl.Schema

    def __call__(
        self,
        columns: list[str] | None,
        predicate: pl.Expr | None,
        count: int | None,
        _batch_rows: int | None,
    ) -> Iterator[pl.DataFrame]:
        for each in map(self._read, self.paths):
            rows = each[:count]  # of what is read: ``head`` came first, and then the predicate
            found = rows if predicate is None else rows.filter(predicate)
            yield found.select(columns or list(self.schema))
            if count is not None:
                count -= rows.height
                if not count:
                    return

    def _read(self, path: str) -> pl.DataFrame:
        try:
            data = ObjectClient(self.url).get(path)
        except FileNotFoundError as error:
            raise CorruptionError(
                f"{self.url}/{path} is part of a dataset and is not there. Collect within ten minutes after scan(); if it "
                "was removed by somebody else, restore it from a backup."
            ) from error
        rows = pl.read_parquet(io.BytesIO(data), hive_partitioning=False)
        lacking = (name for name in self.schema if name not in rows.columns)
        return rows.with_columns(pl.lit(None, self.schema[name]).alias(name) for name in lacking)
