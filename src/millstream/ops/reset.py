"""Resetting an app: all that it has made and can be made again is removed, in an order that a crash may cut.

What an app has made lies in several places, and each remembers the others, so that an app whose folder
is deleted by hand is refused by the topics, databases and datasets that it wrote to. A reset takes them
all together:

=====================================  ==========================================================
a crash, or a failure, after           leaves
=====================================  ==========================================================
1. the mark ``reset-begun``            the app whole; no run begins (``views/running.py``), as after
                                       every later step until the last: reset it again
2. older runs are refused by the home  the same; a run that slept through all of this can commit nothing
3. the databases have forgotten it     its views are gone there; the home still knows the database, which
                                       says, when asked again, that there is nothing
4. its datasets are emptied            some of them are; each keeps its identity until its files are gone
5. its fences in the log are gone      batches could be committed to topics again, by a run that may not
                                       begin. Whoever held the producer's name is fenced off before
6. its folder is empty but for the     part of the folder, and no run that takes it for a whole one. The
   mark                                home, which knows of the others, went first here, after them
7. the mark, and the folder, are gone  all is done: the next run begins as the first one did
=====================================  ==========================================================

Two at a time: a run says that it is alive and then looks for the mark, a reset sets the mark and then
looks for runs. So at least one of them sees the other.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from millstream.client import connect
from millstream.client.kafka.address import is_kafka, shown
from millstream.client.reading import open_reader
from millstream.errors import (
    ConfigError,
    CorruptionError,
    MillstreamError,
    RetriableError,
    UnknownTopicError,
)
from millstream.log.control import CONTROL_NAME
from millstream.log.files import DISK
from millstream.views.commit import DEAD_VIEW
from millstream.views.dataset import (
    dataset_folder,
    dataset_written,
    empty_dataset,
    files_of_dataset,
)
from millstream.views.dead_letters import dead_topic, relay_fences
from millstream.views.postgres_target import AppInDatabase, app_in_database, forget_app
from millstream.views.running import mark_reset, reset_begun, runs_alive
from millstream.views.schema import JOB, check_app_name
from millstream.views.store import ViewStore


@dataclass(frozen=True)
class DatasetFound:
    """A dataset that the app writes: its folder, identity, and what it holds."""

    folder: Path
    identity: str
    files: int
    size_bytes: int


@dataclass(frozen=True)
class Found:
    """What an app has made: what a reset removes, and what it cannot take back.

    ``views`` are rows by view of the app's own store; ``home_problem`` says why that cannot be read, where
    it cannot: then nobody knows what else the app wrote to. ``topics`` says how many offsets, so at most
    so many records, the topics hold to which it writes; None where that is not known. ``replayed`` are the
    dead records, by topic, that were appended again: they stand in it twice.
    """

    app: str
    folder: Path
    log: Path | str = field(repr=False)  # an option of kafka:// may be a password
    files: int
    size_bytes: int
    views: dict[str, int] = field(default_factory=dict)
    home_problem: str | None = None
    databases: dict[str, AppInDatabase] = field(default_factory=dict, repr=False)  # by URL
    datasets: tuple[DatasetFound, ...] = ()
    writes_to_log: bool = False
    fences: int = 0
    topics: dict[str, int | None] = field(default_factory=dict)
    replayed: dict[str, int] = field(default_factory=dict)
    functions: tuple[str, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether there is nothing to remove."""
        return not (self.folder.exists() or self.fences or any(self.databases.values()))


@dataclass
class _Home:
    """What the app's own store knows of it."""

    views: dict[str, int] = field(default_factory=dict)
    targets: list[tuple[str, str]] = field(default_factory=list)  # identity, name
    graph: dict[str, Any] = field(default_factory=dict)
    replayed: dict[str, int] = field(default_factory=dict)
    checkpoint_id: str | None = None
    problem: str | None = None


def look(app: str, state: Path, log: Path | str, databases: Sequence[str] = ()) -> Found:
    """Find what an app has made. Changes nothing.

    Args:
        state: The folder in which it lies, as ``apps/<app>``.
        log: The log that it reads and writes.
        databases: The URLs of the databases that it keeps views in.

    Raises:
        ConfigError: there is nothing of such an app; it runs; or it wrote to a database or a log that
            was not given.
    """
    check_app_name(app)  # it names what is removed
    folder = state / "apps" / app
    _require_stopped(app, folder)
    home = _home(app, folder / "views.db")
    kept = {url: app_in_database(url, app) for url in databases}
    _require_given(app, home, kept, log)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    written = [node["does"] for node in _outputs(home, "topic")]
    found = Found(
        app,
        folder,
        log,
        files=len(paths),
        size_bytes=sum(path.stat().st_size for path in paths),
        views=home.views,
        home_problem=home.problem,
        databases=kept,
        datasets=tuple(_datasets(app, home)),
        writes_to_log=any(_is_log(identity) for identity, _ in home.targets),
        fences=_fences(app, log),
        topics=_records(log, [*written, dead_topic(app)]),
        replayed=home.replayed,
        functions=tuple(node["name"] for node in _outputs(home, "function")),
    )
    if found.empty:
        raise ConfigError(
            f"There is nothing of an app {app!r} in {state}, nor in {shown(log)}. Correct the name, or "
            "--log and --state."
        )
    return found


def reset(found: Found) -> None:
    """Remove it all. Cut off at any moment, it can be done again; see the module for what is left.

    Raises:
        ConfigError: the app runs.
        RetriableError: a database or the log's owner is away, or a file could not be removed: do it again.
    """
    folder = found.folder
    if folder.exists():
        cut_off = reset_begun(folder).exists()
        mark_reset(folder)  # step 1
        _require_stopped(found.app, folder, mark_back=not cut_off)
        _refuse_older_runs(found)  # step 2
    for url, kept in found.databases.items():
        if kept:
            forget_app(url, found.app)  # step 3
    for dataset in found.datasets:
        empty_dataset(dataset.folder, dataset.identity)  # step 4
    if found.fences or found.writes_to_log:
        _forget_fences(found)  # step 5
    if folder.exists():
        try:
            _empty(folder)  # step 6
            # Else the mark might be gone after a loss of power, and not the rest.
            DISK.sync_folder(folder)
            reset_begun(folder).unlink()  # step 7
        except OSError as error:
            raise RetriableError(
                f"{folder} could not be removed whole: {error}. Mend that, and reset the app again."
            ) from error
        with suppress(OSError):  # a link, or a file that came just now: neither is of a state
            folder.rmdir()


# -- looking ----------------------------------------------------------------------------------


def _home(app: str, path: Path) -> _Home:
    if not path.exists():
        return _Home()
    try:
        with closing(ViewStore(path, readonly=True)) as store:
            return _Home(
                {schema.name: store.count(schema.name) for schema in store.views()},
                [(identity, name) for identity, name, _ in store.targets(app, JOB)],
                store.description(app, "graph") or {},
                _replayed(store),
                store.checkpoint_id(app, JOB),
            )
    except (ConfigError, CorruptionError) as error:
        return _Home(problem=str(error))


def _replayed(store: ViewStore) -> dict[str, int]:
    """Count the dead records that were appended again, by topic."""
    if DEAD_VIEW not in {schema.name for schema in store.views()}:
        return {}
    rows = store.scan(DEAD_VIEW).filter(pl.col("replayed_at").is_not_null())
    records = rows.unique(["topic", "partition", "offset"])
    return dict(records.group_by("topic").len().sort("topic").iter_rows())


def _require_stopped(app: str, folder: Path, *, mark_back: bool = False) -> None:
    alive = runs_alive(folder)
    if not alive:
        return
    if mark_back:
        reset_begun(folder).unlink(missing_ok=True)
    raise ConfigError(
        f"{app} is running (process {alive[-1].pid}), and nothing was removed. Stop it first: millstream "
        f"stop {app}."
    )


def _require_given(
    app: str, home: _Home, databases: dict[str, AppInDatabase], log: Path | str
) -> None:
    """Make sure that all can be reached that the app wrote to, and would refuse it afterwards."""
    given = {kept.identity for kept in databases.values()}
    for identity, name in home.targets:
        if identity.startswith("postgresql:") and identity not in given:
            raise ConfigError(
                f"{app} keeps views in {name}, which are to be removed with the rest. Give its URL, with "
                "user and password: --store URL."
            )
        if _is_log(identity) and identity != _log_identity(log):
            raise ConfigError(
                f"{app} writes to topics of {name}, which is not {shown(log)}. Give that log: --log, and with "
                "--state the folder in which the app's state lies."
            )


def _is_log(identity: str) -> bool:
    return identity.startswith(("log:", "kafka:"))


def _log_identity(log: Path | str) -> str | None:
    if not is_kafka(log) and not _is_there(log):
        return None
    with connect(log) as opened:
        return opened.identity


def _is_there(log: Path | str) -> bool:
    """Say whether there is a log, so that none is made by looking."""
    return is_kafka(log) or (Path(log) / CONTROL_NAME).exists()


def _outputs(home: _Home, kind: str) -> list[dict[str, str]]:
    nodes = home.graph.get("nodes", [])
    return [node for node in nodes if node["kind"] == kind and node["id"].startswith("port-")]


def _datasets(app: str, home: _Home) -> list[DatasetFound]:
    found = []
    for identity, folder in _dataset_folders(app, home).items():
        files = files_of_dataset(folder, identity)
        if files is not None:
            size_bytes = sum(path.stat().st_size for path in files)
            found.append(DatasetFound(folder, identity, len(files), size_bytes))
    return found


def _dataset_folders(app: str, home: _Home) -> dict[str, Path]:
    """Give the folders of the app's datasets by identity.

    Of one whose first batch was cut off before the home's commit, only the graph and the dataset know.
    """
    begun = {
        dataset_written(node["does"], app, JOB, home.checkpoint_id): Path(node["does"]).absolute()
        for node in _outputs(home, "dataset")
    }
    noted = {
        identity: dataset_folder(name)
        for identity, name in home.targets
        if identity.startswith("dataset:")
    }
    return {**{identity: folder for identity, folder in begun.items() if identity}, **noted}


def _fences(app: str, log: Path | str) -> int:
    if not _is_there(log):
        return 0
    with connect(log) as opened:
        return sum(len(opened.fences(prefix)) for prefix in _prefixes(app))


def _prefixes(app: str) -> tuple[str, str]:
    """Give what the fences of an app's topics begin with, and those of its dead records."""
    return f"{app}/{JOB}/", relay_fences(app)


def _records(log: Path | str, topics: Sequence[str]) -> dict[str, int | None]:
    """Count the offsets of those of these topics that there are."""
    if not _is_there(log):
        return {}
    reader = open_reader(log)
    found: dict[str, int | None] = {}
    for topic in topics:
        try:
            found[topic] = sum(end - start for start, end in reader.offsets(topic))
        except UnknownTopicError:
            continue
        except MillstreamError:  # what cannot be counted is named all the same
            found[topic] = None
    return found


# -- removing ---------------------------------------------------------------------------------


def _refuse_older_runs(found: Found) -> None:
    if found.home_problem is None and (found.folder / "views.db").exists():
        with closing(ViewStore(found.folder / "views.db")) as store:
            store.refuse_runs(found.app, JOB)


def _forget_fences(found: Found) -> None:
    with connect(found.log) as log:
        # Whoever has this name is fenced off, with the transaction that it has open: none of its batches
        # comes after.
        log.producer(transactional_id=f"{found.app}/{JOB}").close()
        for prefix in _prefixes(found.app):
            log.forget_fences(prefix)


def _empty(folder: Path) -> None:
    """Remove all but the mark: the home last but for its own helpers, as it knows of the others."""
    mark = reset_begun(folder)
    home = folder / "views.db"
    for path in folder.iterdir():
        if path == mark or path.name.startswith(home.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    home.unlink(missing_ok=True)
    for path in folder.glob(f"{home.name}*"):
        path.unlink()
