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
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from millstream.client.recorded import RecordedInput
from millstream.errors import ConfigError
from millstream.kernels.adopted_state import StatePart, combine_state
from millstream.kernels.plan import ForeachSinkSpec, JobPlan, ViewSinkSpec
from millstream.ops.incident import NOTE, library_versions
from millstream.ops.plan import buckets_of_state
from millstream.pipeline.compiler import compile_plan
from millstream.views.schema import JOB
from millstream.views.state_store.program import StoredProgram
from millstream.views.state_store.program_change import pair_steps
from millstream.views.store_location import STATE_STORE_FILE, open_state_store

if TYPE_CHECKING:
    from millstream.pipeline.app import App


def replay_batch(folder: Path, app: App) -> None:
    """Run the batch in a folder by an app, over its records and the state before it.

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
            _run(folder, app, note, Path(scratch))
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


def _run(folder: Path, app: App, note: Mapping[str, Any], scratch: Path) -> None:
    from millstream.spark.local_run import LocalRun  # noqa: PLC0415 - loads pyspark

    shutil.copytree(folder / "state" / "runs", scratch / "runs")
    with open_state_store(folder / "state" / STATE_STORE_FILE, readonly=True) as store:
        stored, manifests = store.program(app.name, JOB), store.state_manifests(app.name, JOB)
    assert stored is not None, "it is written with the manifests"
    plan = _plan_without_sinks(app, stored)
    now = StoredProgram.of(plan, stored.partitioning)
    run = LocalRun(plan, scratch, scratch, scratch / STATE_STORE_FILE)
    if manifests:
        state = combine_state(plan, StatePart(manifests, _pairs(stored, now)), StatePart({}, {}))
        topics = {source.topic for source in plan.sources}
        position = {topic: at for topic, at in note["position"].items() if topic in topics}
        run.begin_from(note["start"], position, [], state, partitioning=stored.partitioning)
    run.run_planned(
        note["start"],
        note["end"],
        RecordedInput(folder / "input"),
        partitioning=dict(stored.partitioning),
    )


def _plan_without_sinks(app: App, stored: StoredProgram) -> JobPlan:
    """Return the plan of an app in which only views of the state store are written."""
    outputs = [
        output if output.spec == ViewSinkSpec() else replace(output, spec=ForeachSinkSpec(_discard))
        for output in app.outputs
    ]
    return compile_plan(app.name, outputs, buckets_of_state(stored), app.on_error)


def _discard(_rows: Any, _context: Any) -> None:
    """Take rows that would go outside."""


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
