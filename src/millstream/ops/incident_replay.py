"""Runs a batch again that was captured with its state: as it failed, or by a program that was mended since.

It is run in this process, without Spark and without a log, by the same stages and the same commit; its range and time are
those that were planned. Nothing outside is written: topics, datasets, databases and functions get no rows.

A mended program has other definitions. Its steps take the state of those that they were, if these differ in expressions and
functions alone, and in what is above them: so the state has the same layout.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from millstream.client.recorded import RecordedInput
from millstream.engine.source.offsets import check_declared
from millstream.engine.stages.journal_files import JOURNAL_FOLDER
from millstream.errors import ConfigError, UserCodeError
from millstream.kernels.adopted_state import StatePart, combine_state
from millstream.kernels.plan import JobPlan
from millstream.ops.incident import NOTE, library_versions
from millstream.ops.state_before import plan_without_sinks
from millstream.views.commit.committer import DEAD_LETTERS_VIEW
from millstream.views.schema import JOB
from millstream.views.state_store.program import StoredProgram
from millstream.views.state_store.program_change import pair_steps
from millstream.views.state_store.store import StateStore
from millstream.views.store_location import STATE_STORE_FILE, open_state_store

if TYPE_CHECKING:
    from millstream.pipeline.app import App


def replay_batch(folder: Path, app: App) -> dict[str, pl.DataFrame]:
    """Run the batch in a folder by an app, over its records and the state before it.

    Return the rows that it sets in each view, which are empty before. Of a batch that was committed, a row on which the
    user's code fails is a failure, also where the app goes on.

    Raises:
        ConfigError: the folder is no incident, or of another app; or the program is one that cannot take its state.
        MillstreamError, or what user code raises: the batch fails. A note on the error names libraries whose versions
            are others than those of the batch.
    """
    note = read_note(folder)
    if app.name != note["app"]:
        raise ConfigError(
            f"The batch in {folder} is of the app {note['app']!r}, and not of {app.name!r}."
        )
    try:
        with tempfile.TemporaryDirectory(prefix="millstream-incident-") as scratch:
            return _run(folder, app, note, Path(scratch))
    except Exception as error:
        if moved := _other_versions(note["versions"]):
            error.add_note(f"Versions are others than when it was captured: {moved}.")
        raise


def read_note(folder: Path) -> dict[str, Any]:
    """Return what is noted of the batch in a folder.

    Raises:
        ConfigError: the folder is no incident.
    """
    try:
        note: dict[str, Any] = json.loads((folder / NOTE).read_text())
    except FileNotFoundError:
        raise ConfigError(f"{folder} is no captured batch: it has no {NOTE}.") from None
    return note


def _run(folder: Path, app: App, note: Mapping[str, Any], scratch: Path) -> dict[str, pl.DataFrame]:
    from millstream.engine.local_run import LocalRun  # noqa: PLC0415 - loads pyspark

    shutil.copytree(folder / "state" / "runs", scratch / "runs")
    with open_state_store(folder / "state" / STATE_STORE_FILE, readonly=True) as store:
        stored, manifests = store.program(app.name, JOB), store.state_manifests(app.name, JOB)
    assert stored is not None, "it is written with the manifests"
    plan = plan_without_sinks(app, stored, answers=True)
    check_declared(note["end"], plan)
    now = StoredProgram.of(plan, stored.partitioning)
    run = LocalRun(plan, scratch, scratch, scratch / STATE_STORE_FILE)
    if manifests:
        state = combine_state(plan, StatePart(manifests, _pairs(stored, now)), StatePart({}, {}))
        topics = {source.topic for source in plan.sources}
        position = {topic: at for topic, at in note["position"].items() if topic in topics}
        run.begin_from(note["start"], position, [], state, partitioning=stored.partitioning)
    _put_answers(folder / "state" / JOURNAL_FOLDER, scratch / "runs", 1 if manifests else 0)
    run.run_planned(
        [note["start"], note["end"]],
        RecordedInput(folder / "input"),
        partitioning=dict(stored.partitioning),
    )
    with open_state_store(scratch / STATE_STORE_FILE, readonly=True) as store:
        if note.get("committed"):
            _fail_on_dead_letters(plan, store)
        names = [one.name for one in store.views() if one.name != DEAD_LETTERS_VIEW]
        return {name: store.scan(name) for name in names}


def _put_answers(folder: Path, runs: Path, batch_id: int) -> None:
    """Put what the batch has learned from outside where its repetition finds it, as the batch ``batch_id``."""
    (runs / JOURNAL_FOLDER).mkdir(exist_ok=True)
    for path in folder.glob("*"):  # a batch that was captured by an earlier version has none
        shutil.copyfile(path, runs / JOURNAL_FOLDER / f"{batch_id}-{path.name}")


def _fail_on_dead_letters(plan: JobPlan, store: StateStore) -> None:
    """Raise for the first row of a batch on which the user's code has failed, though the app goes on.

    Records that could not be decoded are no failure of code.
    """
    dead = store.scan(DEAD_LETTERS_VIEW).sort("topic", "partition", "offset")
    dead = dead.filter(~pl.col("step").is_in([source.name for source in plan.sources]))
    if dead.height:
        first = dead.row(0, named=True)
        place = f"{first['topic']}/{first['partition']}/{first['offset']}"
        raise UserCodeError(
            f"step {first['step']!r} fails on {place}, and on {dead.height - 1} other rows, which became dead letters: "
            f"{first['reason']}",
            step=first["step"],
        )


def _pairs(stored: StoredProgram, now: StoredProgram) -> dict[str, str]:
    """Return under which key the state before a batch has each step of a program.

    Raises:
        ConfigError: a step has no state there, or one that is made otherwise.
    """
    pairs = pair_steps(stored, now)
    for key, step in now.steps.items():
        was = stored.steps.get(pairs.get(key, ""))
        if was is None or _layout(was["definition"]) != _layout(step["definition"]):
            raise ConfigError(
                f"The step {step['name']!r} keeps another state than the program of the batch, so the batch cannot be run "
                "by this program. Mend its expressions and functions, or what is above the step; or deploy the program, which "
                "makes the state anew."
            )
    return pairs


def _layout(definition: Mapping[str, Any]) -> Any:
    """Return a definition without its expressions and functions, and without what is above the step."""
    return _without_expressions({name: one for name, one in definition.items() if name != "reads"})


def _without_expressions(description: Any) -> Any:
    if isinstance(description, Mapping):
        if "text" in description:
            return "expression"
        return {name: _without_expressions(one) for name, one in description.items()}
    if isinstance(description, list):
        return [_without_expressions(one) for one in description]
    return description


def _other_versions(known: Mapping[str, str]) -> str:
    """Say which libraries of the program have other versions here, of those that change what a batch does."""
    here = library_versions()
    moved = (
        f"{name} was {version}, is {here.get(name, 'not there')}"
        for name, version in known.items()
        if here.get(name) != version
    )
    return ", ".join(moved)
