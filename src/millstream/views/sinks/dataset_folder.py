"""A dataset in a folder of this machine, or of a file system that all machines have mounted."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from millstream.errors import ConfigError
from millstream.log.files import DISK, Files, NewFile
from millstream.views.sinks.dataset_files import in_partition_folder
from millstream.views.sinks.dataset_manifest import (
    FILE,
    Manifest,
    dataset_lock,
    read_manifest,
    write_manifest,
)
from millstream.views.sinks.dataset_merge import TIERS

FILE_NAME = re.compile(r"\d{12,}-[0-9a-f]{12}\.parquet")  # batch_id, and what makes it unique


@dataclass
class FolderPlace:
    """A dataset in a folder of this machine. ``disk`` is the file system; only tests give another one."""

    folder: Path
    disk: Files = DISK
    merged_tiers: int = TIERS

    @property
    def text(self) -> str:
        return str(self.folder)

    def lock(self) -> AbstractContextManager[None]:
        return dataset_lock(self.folder)

    def create(self, fresh: Manifest) -> None:
        missing = [one for one in (self.folder, *self.folder.parents) if not one.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)
        for folder in missing:
            self.disk.sync_folder(folder.parent)
        with self.lock():
            if self.read() is None:
                foreign = [one.name for one in self.folder.iterdir() if one.name[0] not in "._"]
                if foreign:
                    raise ConfigError(
                        f"{self.folder} holds {foreign[0]!r} and is no dataset of Millstream. Give "
                        "an empty folder, or one that does not exist."
                    )
                self.write(fresh)

    def read(self) -> Manifest | None:
        return read_manifest(self.folder)

    def write(self, manifest: Manifest) -> None:
        write_manifest(self.folder, manifest, self.disk)

    def stamp(self, manifest: Manifest, run: int) -> str:  # noqa: ARG002 - the lock does it here
        return ""

    def put(self, path: str, data: bytes) -> None:
        file_path = self.folder / path
        missing = [one for one in file_path.parents if not one.exists()]
        file_path.parent.mkdir(parents=True, exist_ok=True)
        with NewFile(self.disk, file_path) as file:
            file.write(data)
            file.sync()
        for folder in {file_path.parent, *(one.parent for one in missing)}:
            self.disk.sync_folder(folder)

    def size_bytes(self, path: str) -> int | None:
        try:
            return (self.folder / path).stat().st_size
        except FileNotFoundError:
            return None

    def open_file(self, path: str) -> Path | bytes:
        return self.folder / path

    def remove(self, paths: Iterable[str]) -> None:
        for path in paths:
            (self.folder / path).unlink(missing_ok=True)

    def files(self, manifest: Manifest, before_run: int | None = None) -> dict[str, int]:  # noqa: ARG002
        inside = "/".join(["*=*"] * len(manifest.partition_by) + ["*.parquet"])
        found = {
            path.relative_to(self.folder).as_posix(): path.stat().st_size
            for path in list(self.folder.glob(inside))
            if FILE_NAME.fullmatch(path.name)
        }
        return {
            path: size_bytes
            for path, size_bytes in found.items()
            if in_partition_folder(path, manifest.partition_by)
        }

    def scan(self, paths: Sequence[str], schema: pl.Schema, *, some_lack: bool) -> pl.LazyFrame:
        return pl.scan_parquet(
            [self.folder / path for path in paths],
            schema=schema,
            missing_columns="insert" if some_lack else "raise",
            hive_partitioning=False,
            glob=False,
        )

    def address_of(self, path: str) -> Path | str:
        return self.folder / path

    def delete(self, identity: str) -> None:
        """Delete the dataset; nothing if it is another one.

        1. A manifest without files and fence is written: a running job is refused, readers see no rows. It
           keeps the identity, so that a repetition after a crash finds the dataset.
        2. The files are removed. A crash leaves some of them.
        3. The folders of partitions are removed, and then the manifest.
        """
        if not self.folder.is_dir():
            return
        with self.lock():
            manifest = self.read()
            if manifest is None or manifest.identity != identity:
                return
            files = self.files(manifest)
            self.write(replace(manifest, fence=None, files=(), replaced=()))
            self.remove(files)
            inner = (path for path in self.folder.rglob("*") if path.is_dir())
            for folder in sorted(inner, reverse=True):
                with suppress(OSError):  # somebody else's file lies in it
                    folder.rmdir()
            (self.folder / FILE).unlink()
