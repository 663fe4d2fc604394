"""From a batch that failed to a test that fails: `millstream capture-incident`.

The batch that comes next is the only one of which all is there: Spark's offset log has its range and its time, the log
its records, and the state store the state before it. State of earlier batches is gone. All of it is packed into a folder,
with the code, which pytest runs: see `ops/incident_replay.py`.

```
<folder>/
  test_incident_<app>_<batch>.py  the test; pytest wants other names in other folders
  incident.json  the app, the batch, its range and time, how it failed, versions of libraries
  code/          the file of the app, and the modules beside it that it has imported
  input/         the records of the batch, one file for each partition
  state/         the state before it: its runs, and a state store with the manifests
```
"""

from __future__ import annotations

import json
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.client.open import open_reader
from millstream.client.recorded import RecordedInput
from millstream.errors import ConfigError, ConflictError, OffsetOutOfRangeError
from millstream.kernels.state.operator_state import run_names
from millstream.kernels.time.watermarks import PartitionProgress
from millstream.object_store.address import is_url
from millstream.ops.deploy import utc_now
from millstream.spark.source.offsets import SourceOffset, planned_offset
from millstream.spark.stages.run_files import object_name
from millstream.views.position import SOURCE_OFFSET
from millstream.views.runs.control_files import active_runs
from millstream.views.runs.failure import last_failure
from millstream.views.schema import JOB, Fence
from millstream.views.state_store.program import StoredProgram
from millstream.views.state_store.program_tables import RunProgram
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import (
    STATE_STORE_FILE,
    open_state_store,
    state_store_exists,
)

if TYPE_CHECKING:
    from millstream.pipeline.app import App

NOTE = "incident.json"
Manifests = Mapping[tuple[int, int], bytes]

_TEST = '''"""Batch {batch_id} of the app {app!r} failed:

{failure}

Here it is run again: its records (input/) over the state before it (state/), by the program in code/. It fails as it
failed then, and passes once the program is mended. Mend it in code/, or let APP be the file that you work on.
"""

from pathlib import Path

from millstream.testing import replay_incident

FOLDER = Path(__file__).parent
APP = FOLDER / "code" / {file!r}


def test_the_batch_runs():
    replay_incident(FOLDER, APP)
'''


@dataclass(frozen=True)
class Incident:
    """A batch that was packed into a folder: how many records, and how the app's last run ended, if that is known."""

    app: str
    batch_id: int
    folder: Path
    records: int
    failure: str | None


@dataclass(frozen=True)
class _Batch:
    """A batch that was planned and not committed: from one source offset to another, over a program's state."""

    batch_id: int
    start: SourceOffset
    end: SourceOffset
    program: StoredProgram
    manifests: Manifests
    position: Mapping[str, Any]


def capture_incident(
    app: App,
    file: Path,
    folder: Path | None = None,
    batch_id: int | None = None,
    *,
    clock: Callable[[], datetime] = utc_now,
) -> Incident:
    """Pack a batch of an app that is stopped into a folder, which pytest runs.

    Args:
        file: What declares the app. It is packed with the modules beside it that are imported now.
        folder: It is made, and must not be there; by default ``incident-APP-BATCH``, here.
        batch_id: By default the batch that comes next. Of no other is there all that is needed.

    Raises:
        ConfigError: there is no such batch, or not all of it any more; the app has steps of Spark's own, or keeps its runs
            of state in an object store; or the folder is there.
        ConflictError: the app runs.
    """
    if active_runs(app.folder):
        raise ConflictError(
            f"{app.name} runs, and the batch may be committed meanwhile. Stop it (millstream stop {app.name})."
        )
    _check_possible(app)
    batch = _find_batch(app, batch_id)
    folder = folder or Path(f"incident-{app.name}-{batch.batch_id}")
    if folder.exists():
        raise ConfigError(f"{folder} is there already. Give a folder that is not.")
    made = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(made, ignore_errors=True)
    records = _write_input(app, batch, made / "input")
    _write_state(app, batch, made / "state", clock().isoformat(timespec="seconds"))
    _write_code(file, made / "code")
    failure = last_failure(app.folder)
    note = {
        "app": app.name,
        "batch_id": batch.batch_id,
        "captured_at": clock().isoformat(timespec="seconds"),
        "start": batch.start.to_json(),
        "end": batch.end.to_json(),
        "position": batch.position,
        "failure": None if failure is None else asdict(failure),
        "versions": library_versions(),
    }
    (made / NOTE).write_text(json.dumps(note, indent=2))
    said = "how is not known" if failure is None else f"{failure.kind}: {failure.reason}"
    text = _TEST.format(
        app=app.name, batch_id=batch.batch_id, failure=_quoted(said), file=file.name
    )
    (made / f"{_test_name(app.name, batch.batch_id)}.py").write_text(text)
    made.rename(folder)  # a crash before leaves a folder that the next call removes
    return Incident(app.name, batch.batch_id, folder, records, None if failure is None else said)


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of all packages that are installed here."""
    found = {one.metadata["Name"]: one.version for one in distributions()}
    return {"Python": platform.python_version(), **dict(sorted(found.items()))}


def _test_name(app: str, batch_id: int) -> str:
    return "test_incident_" + re.sub(r"\W", "_", f"{app}_{batch_id}")


def _quoted(text: str) -> str:
    """Return a text for a docstring, as lines of it."""
    plain = text.replace("\\", "\\\\").replace('"""', "'''").replace("\0", "\\0")
    return "\n".join(f"    {line}" for line in plain.splitlines())


def _check_possible(app: App) -> None:
    if not state_store_exists(app.state_store):
        raise ConfigError(f"{app.name} has never run: there is no batch of it.")
    if is_url(app.state):
        raise ConfigError(
            f"The runs of state of {app.name} are in an object store, from which none are packed. Run it with its state in "
            "a folder to capture a batch."
        )
    if names := app.plan().spark_steps:
        raise ConfigError(
            f"{', '.join(map(repr, names))} of {app.name} is computed by Spark, and a batch is run again without it."
        )


def _find_batch(app: App, batch_id: int | None) -> _Batch:
    """Return the batch that comes next, if it is the one that is asked for.

    Raises:
        ConfigError: it is not, or it was not planned.
    """
    with open_state_store(app.state_store, readonly=True) as store:
        program, last = store.program(app.name, JOB), store.last_batch_id(app.name)
        known = store.status(app.name, JOB).get(SOURCE_OFFSET)
        manifests, position = store.state_manifests(app.name, JOB), store.position(app.name)
    following = 0 if last is None else last + 1
    if program is None:
        raise ConfigError(f"{app.name} has never run: there is no batch of it.")
    if batch_id is not None and batch_id != following:
        raise ConfigError(_no_such_batch(app.name, batch_id, following))
    checkpoint = app.folder / "checkpoint"
    planned = planned_offset(checkpoint, following)
    before = planned_offset(checkpoint, following - 1) or known
    if planned is None or (following and before is None):
        raise ConfigError(
            f"Batch {following} of {app.name} was never begun: its last run ended in order. Nothing is there to capture."
        )
    end = SourceOffset.from_json(planned)
    start = _log_start(app, end) if before is None else SourceOffset.from_json(before)
    return _Batch(following, start, end, program, manifests, position)


def _no_such_batch(app: str, batch_id: int, following: int) -> str:
    if batch_id > following:
        return f"{app} has not come to batch {batch_id}: the one that comes next is {following}."
    return (
        f"Batch {batch_id} of {app} is committed, and the state before it is gone: state is kept as of the last batch. "
        f"Only batch {following}, which comes next, can be captured."
    )


def _log_start(app: App, end: SourceOffset) -> SourceOffset:
    """Return the source offset of the start of the log, where the first batch begins."""
    log = open_reader(app.log)
    topics = {
        topic: tuple(PartitionProgress(start, 0) for start, _ in log.offsets(topic))
        for topic in end.topics
    }
    return replace(end, clock_ms=0, topics=topics, idle={}, behind={}, wall_ms=0)


def _write_input(app: App, batch: _Batch, folder: Path) -> int:
    folder.mkdir(parents=True)
    reader = open_reader(app.log).pinned(batch.end.topic_ids)
    recorded, records = RecordedInput(folder), 0
    for topic in sorted(batch.end.topics):
        starts = batch.start.offsets(topic) if topic in batch.start.topics else []
        for partition, end in enumerate(batch.end.offsets(topic)):
            start = starts[partition] if partition < len(starts) else 0
            try:
                records += recorded.record(reader, topic, partition, start, end)
            except OffsetOutOfRangeError as error:
                raise ConfigError(
                    f"Batch {batch.batch_id} of {app.name} reads {topic}/{partition} [{start}, {end}), and the log no longer "
                    f"holds all of that: {error}. It cannot be captured any more."
                ) from None
    return records


def _write_state(app: App, batch: _Batch, folder: Path, at: str) -> None:
    """Write the manifests before a batch into a state store of its own, and copy the runs that they name."""
    (folder / "runs").mkdir(parents=True)
    messages = (one for each in batch.manifests.values() for one in json.loads(each).values())
    for name in {object_name(run) for message in messages for run in run_names(message)}:
        shutil.copyfile(app.folder / "runs" / name, folder / "runs" / name)
    with open_state_store(folder / STATE_STORE_FILE) as store:
        _put(store, app.name, batch, at)


def _put(store: StateStore, app: str, batch: _Batch, at: str) -> None:
    run, _ = store.begin_run(app, JOB, "incident", RunProgram(batch.program, {}, at))
    fence = Fence(app, JOB, run, 0)
    store.commit(fence, [], position=batch.position, status={}, state=batch.manifests)


def _write_code(file: Path, folder: Path) -> None:
    """Copy the file of an app, and the modules in its folder that were imported."""
    root = file.resolve().parent
    folder.mkdir(parents=True)
    shutil.copyfile(file, folder / file.name)
    for module in tuple(sys.modules.values()):
        path = getattr(module, "__file__", None)
        if path is None or not _is_own(Path(path), root):
            continue
        target = folder / Path(path).resolve().relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)


def _is_own(path: Path, root: Path) -> bool:
    """Return whether a module is of the program, and not installed in an environment beside it."""
    found = path.resolve()
    installed = {"site-packages", "dist-packages"} & {*found.parts}
    return found.suffix == ".py" and found.is_relative_to(root) and not installed
