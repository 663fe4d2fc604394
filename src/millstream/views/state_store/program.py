"""The program that created a job's state, as the state store keeps it, and the check of another program.

The state store commits last, so it decides what the job is: its stateful steps, how its keys are divided,
which topics it reads. A run whose program differs is refused before it does anything; the error says
which step differs, and how. No file decides about that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.definition import canonical_text
from millstream.kernels.plan import JobPlan
from millstream.kernels.state.keyhash import Buckets
from millstream.views.runs.control_files import ResetTarget, reset_command
from millstream.views.state_store.definition_comparison import (
    PASSED,
    same_definition,
    same_text,
    whole_definition,
)
from millstream.views.state_store.definition_difference import differences

STATE_FORMAT = 8
"""The format version of manifests and runs. State of another version is refused, but for those that are read as it.

With each, what an app leaves in it is kept for the tests of later versions: tests/state_formats/make.py.
"""

_READ_AS_IT = frozenset({6, 7})  # 6 has no shares of runs, 7 none that can be put together again


@dataclass(frozen=True)
class StoredProgram:
    """A job's program, as JSON values.

    ``steps`` are the stateful steps by the keys of their state, each with ``name`` and ``definition``, and with ``passed``
    where other steps pass rows on to it (`definition_comparison.py`);
    ``outputs`` are the definitions of outputs by name. ``partitioning`` says how the work is divided
    (``JobMetadata.partitioning``); ``versions`` are those of the libraries that describe expressions and
    functions. ``given`` has a digest of the rows of each static table: another program may give others, but
    not for a batch that was told to somebody.
    """

    buckets: int
    steps: dict[str, Any]
    outputs: dict[str, Any]
    topics: list[str]
    frames: int
    partitioning: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    format: int = STATE_FORMAT

    @classmethod
    def of(cls, plan: JobPlan, partitioning: Mapping[str, int]) -> StoredProgram:
        """Return the program of a plan."""
        program = plan.program
        steps = {
            key: {"name": step.name, "definition": step.description}
            | ({} if step.passed is None else {PASSED: step.passed})
            for key, step in program.steps.items()
        }
        versions = {
            "polars": pl.__version__,
            "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        }
        return cls(
            plan.buckets.count,
            steps,
            dict(program.outputs),
            list(program.topics),
            program.frames,
            dict(partitioning),
            versions,
            dict(program.given),
        )

    def to_json(self) -> str:
        """Return the text in which the state store keeps it."""
        return json.dumps(vars(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> StoredProgram:
        """Return the program that :meth:`to_json` wrote.

        Of a program of another format, only the number of the format is read: its other keys may mean
        something else. :func:`check_same_program` refuses it.
        """
        values = json.loads(text)
        if values["format"] in _READ_AS_IT:
            values["format"] = STATE_FORMAT
        if values["format"] != STATE_FORMAT:
            return cls(0, {}, {}, [], 0, format=values["format"])
        return cls(**values)


def buckets_of_state(stored: StoredProgram) -> Buckets:
    """Return how a run divides the keys of stored state."""
    division = stored.partitioning
    return Buckets(division.get("bucket_count", stored.buckets), division.get("hash_seed", 0))


def buckets_of_manifests(stored: StoredProgram) -> Buckets:
    """Return how the keys of stored state are divided now: after a rescale otherwise than in the next run, until it begins."""
    wanted = buckets_of_state(stored)
    return replace(wanted, count=stored.partitioning.get("state_buckets", 0) or wanted.count)


def check_same_program(
    stored: StoredProgram, now: StoredProgram, folder: Path | ResetTarget, *, same_expressions: bool
) -> None:
    """Make sure that a program may go on with stored state.

    Args:
        folder: Where the state is, for the error.
        same_expressions: The user states that expressions and functions with the same text are the same,
            although another version of polars or Python describes them differently.

    Raises:
        ConfigError: it may not; the message says what differs, step by step.
    """
    if stored.format != now.format:
        raise _other_format(stored.format, now.format, folder)
    _require_same_buckets(stored, now, folder)
    found = [*_different_inputs(stored, now), *different_steps(stored, now)]
    if found:
        raise ConfigError(
            f"The program is not the one that the state in {folder} was made by: "
            f"{'; '.join(found)}. Undo the change, or see by `millstream plan` what it does, and have it done by "
            "`millstream deploy`. Or give the app another name to build its state again "
            f"beside the old, or start over: {reset_command(folder)}."
        )
    unclear = _ambiguous_steps(stored, now)
    if unclear and not same_expressions:
        raise _ambiguous_error(stored, now, unclear)
    _check_unambiguous(stored, now, folder)


def find_refusals(stored: StoredProgram, now: StoredProgram, buckets: int) -> Iterator[str]:
    """Yield why a program cannot use any of the stored state, as texts.

    ``buckets`` is the number that the app declares.
    """
    if stored.format != now.format:
        yield (
            f"the state has format {stored.format}, of another version of Millstream; this version reads {now.format}"
        )
        return
    division = stored.partitioning
    count = division.get("bucket_count", stored.buckets)
    first = division.get("declared_buckets") or count
    if buckets not in (first, count):
        yield (
            f"the state is divided into {count} buckets and the app asks for {buckets}: use buckets={first}, and "
            "millstream rescale to divide it"
        )
    yield from _different_inputs(stored, now)


def _other_format(stored: int, now: int, folder: Path | ResetTarget) -> ConfigError:
    if stored > now:
        return ConfigError(
            f"The state in {folder} was made by a later version of Millstream (state format {stored}; "
            f"this version reads {now}). Upgrade millstream."
        )
    return ConfigError(
        f"The state in {folder} was made by an earlier version of Millstream (state format {stored}; "
        f"this version reads {now}). Continue with that version, or rebuild the state from the log: "
        f"{reset_command(folder)}."
    )


def _check_unambiguous(stored: StoredProgram, now: StoredProgram, folder: object) -> None:
    """Make sure that steps with the same text and changed descriptions can find their own states.

    The keys of such steps depend on the order of their descriptions, which may have changed.
    """
    kin: dict[str, set[str]] = {}
    moved: dict[str, str] = {}
    for key, step in now.steps.items():
        stem = key.partition("#")[0]
        kin.setdefault(stem, set()).add(canonical_text(whole_definition(step)))
        if not same_definition(_of(stored, key), _of(now, key)):
            moved[stem] = step["name"]
    alike = [name for stem, name in moved.items() if len(kin[stem]) > 1]
    if alike:
        raise ConfigError(
            f"Several steps read like {', '.join(map(repr, alike))} and do something else, and another "
            f"version of polars or Python describes them otherwise than when the state in {folder} was "
            "made: which state belongs to which step is not known. Run the app with the versions before, or "
            "give it another name to build its state again."
        )


def _ambiguous_steps(stored: StoredProgram, now: StoredProgram) -> list[str]:
    """Return the names of steps and outputs with the same text, described differently by other versions."""
    definitions = {now.steps[key]["name"]: (_of(stored, key), _of(now, key)) for key in now.steps}
    if stored.versions != now.versions:
        definitions |= {
            name: (stored.outputs[name], now.outputs[name])
            for name in now.outputs
            if name in stored.outputs and same_text(stored.outputs[name], now.outputs[name])
        }
    return [name for name, (was, after) in definitions.items() if not same_definition(was, after)]


def _of(program: StoredProgram, key: str) -> Any:
    return whole_definition(program.steps[key])


def _require_same_buckets(
    stored: StoredProgram, now: StoredProgram, folder: Path | ResetTarget
) -> None:
    wanted = stored.partitioning.get("bucket_count", stored.buckets)  # since a rescale
    if now.buckets == wanted:
        return
    raise ConfigError(
        f"The app's state in {folder} is divided into {wanted} buckets and the app asks for "
        f"{now.buckets}. Use buckets={wanted}, or give the app another name to build its state again."
    )


def _different_inputs(stored: StoredProgram, now: StoredProgram) -> Iterator[str]:
    if stored.topics != now.topics:
        was, reads = (", ".join(map(repr, p.topics)) or "none" for p in (stored, now))
        yield f"it read the topics {was}, and reads {reads}"
    if stored.frames != now.frames:
        yield f"it read {stored.frames} DataFrames of Spark, and reads {now.frames}"


def different_steps(stored: StoredProgram, now: StoredProgram) -> list[str]:
    """Return what differs, step by step, without differences that follow from an upstream step."""
    upgraded = stored.versions != now.versions
    telling: list[str] = []
    following: list[str] = []
    for was, after in _pairs(stored, now):
        if was is None or after is None:
            is_new = was is None
            name = (after or was or {})["name"]
            telling.append(f"step {name!r} {'is new' if is_new else 'is no longer there'}")
            continue
        definitions = whole_definition(was), whole_definition(after)
        if upgraded and same_text(*definitions):
            continue  # it may well be the same: see `_ambiguous_steps`
        found = list(differences(*definitions))
        causes = [one for one in found if not one.derived]
        texts = ", and ".join(one.text for one in causes or found)
        (telling if causes else following).append(f"step {after['name']!r}: {texts}")
    return telling or following


def _pairs(stored: StoredProgram, now: StoredProgram) -> Iterator[tuple[Any, Any]]:
    """Pair the stored and the declared step of each that differs: by key, by name, then in order."""
    for key in stored.steps.keys() & now.steps.keys():
        if not same_definition(_of(stored, key), _of(now, key)):
            yield stored.steps[key], now.steps[key]
    gone = [step for key, step in stored.steps.items() if key not in now.steps]
    new = [step for key, step in now.steps.items() if key not in stored.steps]
    for same_name in (True, False):
        for step in list(new):
            kin = [one for one in gone if not same_name or one["name"] == step["name"]]
            if kin and (same_name or len(gone) == len(new)):
                gone.remove(kin[0])
                new.remove(step)
                yield kin[0], step
    yield from ((step, None) for step in gone)
    yield from ((None, step) for step in new)


def _ambiguous_error(
    stored: StoredProgram, now: StoredProgram, unclear: Sequence[str]
) -> ConfigError:
    moved = [
        f"{name} was {stored.versions[name]} and is {version}"
        for name, version in now.versions.items()
        if stored.versions.get(name) != version
    ]
    names = ", ".join(map(repr, unclear))
    return ConfigError(
        f"{' and '.join(moved)}: it describes the expressions or functions of {names} otherwise than "
        "when their state was made. They read the same, but not all options and no code can be "
        "compared across such versions. If the program has not changed, run it once with "
        "run(same_expressions=True), or --same-expressions; otherwise run it with the version before, or "
        "give the app another name to build its state again."
    )
