"""Resets an app: removes all that can be built again from the log, in an order that survives a crash.

The state of an app is in several places, which have each other's fences: topics, databases and datasets
refuse an app whose folder was deleted by hand. A reset removes all of it:

=======================================  ==========================================================
a crash, or a failure, after             leaves
=======================================  ==========================================================
1. the file ``reset-begun`` is written   the whole app; no run begins (``views/runs/control_files.py``),
                                         here and after every later step but the last: reset it again
2. the state store refuses older runs    the same; a run that was suspended can commit nothing. A store in a
                                         database is marked, too: no run begins on any machine
3. its views are gone from databases     the state store still names the databases; to remove the views
                                         again does nothing
4. its datasets are deleted, and its     some of them; each dataset keeps its identity until its files are gone.
   objects where its state is at a URL   The state store still names the URL
5. its fences in the log are deleted     nothing that could commit to the topics again: no run begins, and
                                         the transactional id was fenced before
6. its folder is empty but for the file  a part of the folder, and no run starts on it. The state store,
   ``reset-begun``                       which names the other places, is removed after all else; one in
                                         a database before the file that names it
7. the file and the folder are gone      nothing: the next run begins as the first one did
=======================================  ==========================================================

If a run and a reset begin at the same time, at least one of them sees the other: a run locks its file and
then looks for ``reset-begun``; a reset writes ``reset-begun`` and then looks for runs.
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
from millstream.client.address import log_folder, shown
from millstream.client.open import open_reader
from millstream.errors import (
    ConfigError,
    CorruptionError,
    MillstreamError,
    RetriableError,
    UnknownTopicError,
)
from millstream.log.control import CONTROL_NAME
from millstream.log.files import DISK
from millstream.object_store.place import DESCRIPTION, StatePlace, remove_place
from millstream.views.address import StateStoreAddress, split_store_url
from millstream.views.commit.committer import DEAD_LETTERS_VIEW
from millstream.views.dead_letter_relay import dead_letter_topic, relay_fence_prefix
from millstream.views.dead_letters import RECORD_ID
from millstream.views.postgres.reader import holds_views
from millstream.views.postgres.state_store import PostgresStateStore
from millstream.views.runs.control_files import (
    active_runs,
    is_deploying,
    reset_marker,
    write_reset_marker,
)
from millstream.views.schema import JOB, check_app_name
from millstream.views.sinks.dataset import (
    dataset_address,
    dataset_files,
    delete_dataset,
    owned_dataset_identity,
)
from millstream.views.sinks.postgres import AppInDatabase, app_in_database, forget_app
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import (
    STATE_STORE_FILE,
    StoreLocation,
    open_state_store,
    state_store_exists,
    state_stores_of,
)
from millstream.views.store_note import STORE_NOTE_FILE, noted_store


@dataclass(frozen=True)
class AppDataset:
    """A dataset that the app writes: its folder or URL, identity, and what it holds."""

    address: str
    identity: str
    files: int
    size_bytes: int


@dataclass(frozen=True)
class AppObjects:
    """The objects of an app whose runs of state are at a URL."""

    place: StatePlace
    count: int


@dataclass(frozen=True)
class AppFootprint:
    """What an app has written: what a reset removes, and what stays.

    ``views`` are the rows of each view of the app's own store. ``state_store_problem`` says why the store
    cannot be read: then it is not known what else the app wrote to. ``topics`` are the numbers of offsets
    in the topics that it writes to, at most so many records; None if not known. ``replayed`` are the
    numbers of dead letters, by topic, that were appended again: the topic has them twice.
    """

    app: str
    folder: Path
    log: Path | str = field(repr=False)  # an option of kafka:// may be a password
    files: int
    size_bytes: int
    views: dict[str, int] = field(default_factory=dict)
    state_store_problem: str | None = None
    databases: dict[str, AppInDatabase] = field(default_factory=dict, repr=False)  # by URL
    datasets: tuple[AppDataset, ...] = ()
    objects: AppObjects | None = None
    writes_to_log: bool = False
    fences: int = 0
    topics: dict[str, int | None] = field(default_factory=dict)
    replayed: dict[str, int] = field(default_factory=dict)
    functions: tuple[str, ...] = ()
    state_store: StateStoreAddress | None = None

    @property
    def empty(self) -> bool:
        """Whether there is nothing to remove."""
        return not (
            self.folder.exists() or self.fences or any(self.databases.values()) or self.state_store
        )


@dataclass
class _StateStoreInfo:
    """What the app's own store says about it."""

    views: dict[str, int] = field(default_factory=dict)
    sinks: list[tuple[str, str]] = field(default_factory=list)  # identity, name
    graph: dict[str, Any] = field(default_factory=dict)
    replayed: dict[str, int] = field(default_factory=dict)
    checkpoint_id: str | None = None
    place: StatePlace | None = None
    problem: str | None = None


def find_footprint(
    app: str, state: Path, log: Path | str, databases: Sequence[str] = ()
) -> AppFootprint:
    """Find what an app has written. Changes nothing.

    Args:
        state: The folder that has its folder ``apps/<app>``.
        log: The log that it reads and writes.
        databases: The URLs of the databases that it keeps views or its state in.

    Raises:
        ConfigError: there is nothing of such an app; it runs; or it wrote to a database or a log that
            was not given.
        RetriableError: the object store with its state does not respond.
    """
    check_app_name(app)  # it names what is removed
    folder = state / "apps" / app
    _check_stopped(app, folder)
    address = _state_store_address(app, folder, databases)
    state_store = _read_state_store(app, address or folder / STATE_STORE_FILE)
    kept = {url: app_in_database(url, app) for url in databases if _may_hold_views(url, address)}
    _check_all_stores_named(app, state_store, kept, log)
    paths = [path for path in folder.rglob("*") if path.is_file()]
    written = [node["does"] for node in _outputs(state_store, "topic")]
    found = AppFootprint(
        app,
        folder,
        log,
        files=len(paths),
        size_bytes=sum(path.stat().st_size for path in paths),
        views=state_store.views,
        state_store_problem=state_store.problem,
        databases=kept,
        datasets=tuple(_datasets(app, state_store)),
        objects=_objects(state_store.place),
        writes_to_log=any(_is_log(identity) for identity, _ in state_store.sinks),
        fences=_fences(app, log),
        topics=_records(log, [*written, dead_letter_topic(app)]),
        replayed=state_store.replayed,
        functions=tuple(node["name"] for node in _outputs(state_store, "function")),
        state_store=address,
    )
    if found.empty:
        raise ConfigError(
            f"There is nothing of an app {app!r} in {state}, nor in {shown(log)}. Correct the name, or "
            "--log and --state."
        )
    return found


def reset(found: AppFootprint) -> None:
    """Remove all of it. After a crash it can be repeated: see the module for what is left.

    Raises:
        ConfigError: the app runs.
        RetriableError: a database, the object store or the log's owner is not available, or a file could not be removed: repeat
            the reset.
    """
    folder = found.folder
    if folder.exists():
        repeated = reset_marker(folder).exists()
        write_reset_marker(folder)  # step 1
        _check_stopped(found.app, folder, remove_marker=not repeated)
    place = _refuse_older_runs(found)  # step 2
    for url, kept in found.databases.items():
        if kept:
            forget_app(url, found.app)  # step 3
    for dataset in found.datasets:
        delete_dataset(dataset.address, dataset.identity)  # step 4
    if place is not None:
        remove_place(place)
    if found.fences or found.writes_to_log:
        _remove_fences(found)  # step 5
    if not folder.exists():
        _drop_state_store(found)
    else:
        try:
            _empty(folder)  # step 6
            _drop_state_store(found)
            (folder / STORE_NOTE_FILE).unlink(missing_ok=True)
            # Otherwise, after a loss of power the marker might be gone and other files not.
            DISK.sync_folder(folder)
            reset_marker(folder).unlink()  # step 7
        except OSError as error:
            raise RetriableError(
                f"{folder} could not be removed whole: {error}. Correct that, and reset the app again."
            ) from error
        with suppress(
            OSError
        ):  # a link, or a file that was created just now: neither is of the app
            folder.rmdir()


# -- finding ----------------------------------------------------------------------------------


def _state_store_address(
    app: str, folder: Path, databases: Sequence[str]
) -> StateStoreAddress | None:
    """Return where the app has its state, if that is in a database: in one given, or the one noted.

    Raises:
        ConfigError: it is in several places of those given, in one and in the folder, or in one that cannot
            be reached.
    """
    given = [one for url in databases for one in state_stores_of(url, app)]
    noted = noted_store(folder)
    if len(given) > 1:
        places = "; ".join(map(str, given))
        raise ConfigError(f"The app {app!r} has state in {places}. Say which: ?schema=NAME.")
    if given and noted is None and _has_batches(app, folder / STATE_STORE_FILE):
        raise ConfigError(
            f"An app {app!r} has state in {folder}, and one in {given[0]}: these are two. To reset that in the "
            "database, give a folder without the other: --state. To reset that in the folder, leave out --store; if "
            "it keeps views in that database, too, give a user who has no right to the schema."
        )
    if given:
        return given[0]
    return noted if noted is not None and state_store_exists(noted) else None


def _has_batches(app: str, file: Path) -> bool:
    if not file.exists():
        return False
    try:
        with closing(open_state_store(file, readonly=True)) as store:
            return store.last_batch_id(app, JOB) is not None
    except (ConfigError, CorruptionError):
        return True  # as far as is known


def _may_hold_views(url: str, state_store: StateStoreAddress | None) -> bool:
    """Return whether a database is to hold views beside the apps' own stores."""
    database, schema, _ = split_store_url(url)
    if state_store is None or database.shown != state_store.database.shown:
        return True
    return schema is None and holds_views(database)


def _read_state_store(app: str, location: StoreLocation) -> _StateStoreInfo:
    if isinstance(location, Path) and not location.exists():
        return _StateStoreInfo()
    try:
        with closing(open_state_store(location, readonly=True)) as store:
            return _StateStoreInfo(
                {schema.name: store.count(schema.name) for schema in store.views()},
                [(identity, name) for identity, name, _ in store.sinks(app, JOB)],
                store.description(app, "graph") or {},
                _replayed(store),
                store.checkpoint_id(app, JOB),
                _place(app, store),
            )
    except (ConfigError, CorruptionError) as error:
        return _StateStoreInfo(problem=str(error))


def _place(app: str, store: StateStore) -> StatePlace | None:
    return StatePlace.from_message(store.description(app, DESCRIPTION))


def _replayed(store: StateStore) -> dict[str, int]:
    """Count the dead letters that were appended again, by topic."""
    if DEAD_LETTERS_VIEW not in {schema.name for schema in store.views()}:
        return {}
    rows = store.scan(DEAD_LETTERS_VIEW).filter(pl.col("replayed_at").is_not_null())
    records = rows.unique(RECORD_ID)
    return dict(records.group_by("topic").len().sort("topic").iter_rows())


def _check_stopped(app: str, folder: Path, *, remove_marker: bool = False) -> None:
    alive, deploying = active_runs(folder), is_deploying(folder)
    if not alive and not deploying:
        return
    if remove_marker:
        reset_marker(folder).unlink(missing_ok=True)
    if deploying:
        raise ConfigError(
            f"A deployment or comparison of {app} is at work, and nothing was removed. Wait for it, or stop it, and reset "
            "the app then."
        )
    raise ConfigError(
        f"{app} is running (process {alive[-1].pid}), and nothing was removed. Stop it first: millstream "
        f"stop {app}."
    )


def _check_all_stores_named(
    app: str, state_store: _StateStoreInfo, databases: dict[str, AppInDatabase], log: Path | str
) -> None:
    """Make sure that every database and log that the app wrote to was given."""
    given = {kept.identity for kept in databases.values()}
    for identity, name in state_store.sinks:
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
    if not _log_exists(log):
        return None
    with connect(log) as opened:
        return opened.identity


def _log_exists(log: Path | str) -> bool:
    """Return whether there is a log: connecting would create one."""
    folder = log_folder(log)
    return folder is None or (folder / CONTROL_NAME).exists()


def _outputs(state_store: _StateStoreInfo, kind: str) -> list[dict[str, str]]:
    nodes = state_store.graph.get("nodes", [])
    return [node for node in nodes if node["kind"] == kind and node["id"].startswith("port-")]


def _datasets(app: str, state_store: _StateStoreInfo) -> list[AppDataset]:
    found = []
    for identity, address in _dataset_addresses(app, state_store).items():
        files = dataset_files(address, identity)
        if files is not None:
            found.append(AppDataset(address, identity, len(files), sum(files.values())))
    return found


def _objects(place: StatePlace | None) -> AppObjects | None:
    if place is None:
        return None
    root = place.url.folder
    if root is not None and not root.is_dir():
        raise ConfigError(
            f"The state is at {place.url.text}, which is not on this machine: its objects would stay there for ever. "
            "Reset the app on a machine that has this folder; if it is gone from all, make it here, empty, first."
        )
    return AppObjects(place, sum(1 for _ in place.open().names()))


def _dataset_addresses(app: str, state_store: _StateStoreInfo) -> dict[str, str]:
    """Return the folders and URLs of the app's datasets by identity.

    A dataset whose first batch was interrupted before the state store's commit is known only by the graph
    and by its own manifest.
    """
    begun = {
        owned_dataset_identity(node["does"], app, JOB, state_store.checkpoint_id): node["does"]
        for node in _outputs(state_store, "dataset")
    }
    noted = {
        identity: dataset_address(name)
        for identity, name in state_store.sinks
        if identity.startswith("dataset:")
    }
    return {**{identity: address for identity, address in begun.items() if identity}, **noted}


def _fences(app: str, log: Path | str) -> int:
    if not _log_exists(log):
        return 0
    with connect(log) as opened:
        return sum(len(opened.fences(prefix)) for prefix in _fence_prefixes(app))


def _fence_prefixes(app: str) -> tuple[str, str]:
    """Return the prefixes of the fences of an app's topics and of its dead-letter relay."""
    return f"{app}/{JOB}/", relay_fence_prefix(app)


def _records(log: Path | str, topics: Sequence[str]) -> dict[str, int | None]:
    """Count the offsets of the topics that exist."""
    if not _log_exists(log):
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


def _refuse_older_runs(found: AppFootprint) -> StatePlace | None:
    """Fence all runs; return where the objects of the state are, which a run may have noted just now."""
    if found.state_store_problem is not None:
        return None
    if found.state_store is not None:
        with closing(PostgresStateStore(found.state_store)) as in_database:
            in_database.mark_reset()
            in_database.fence_runs(found.app, JOB)
            return _place(found.app, in_database)
    if (found.folder / STATE_STORE_FILE).exists():
        with closing(SqliteStateStore(found.folder / STATE_STORE_FILE)) as store:
            store.fence_runs(found.app, JOB)
            return _place(found.app, store)
    return None


def _drop_state_store(found: AppFootprint) -> None:
    if found.state_store is not None and state_store_exists(found.state_store):
        with closing(PostgresStateStore(found.state_store)) as store:
            store.drop()


def _remove_fences(found: AppFootprint) -> None:
    with connect(found.log) as log:
        # This fences a producer of that id and aborts its open transaction: it commits no batch after this.
        log.producer(transactional_id=f"{found.app}/{JOB}").close()
        for prefix in _fence_prefixes(found.app):
            log.delete_fences(prefix)


def _empty(folder: Path) -> None:
    """Remove all but the marker; the state store after all else, then SQLite's files beside it."""
    marker = reset_marker(folder)
    state_store = folder / STATE_STORE_FILE
    for path in folder.iterdir():
        kept = path == marker or path.name == STORE_NOTE_FILE
        if kept or path.name.startswith(state_store.name):
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    state_store.unlink(missing_ok=True)
    for path in folder.glob(f"{state_store.name}*"):
        path.unlink()
