"""The program that a job's state was made by, as its home keeps it, and what of another one fits it.

The home commits last, so it has the last word on what the job is: its stateful steps, how its keys are
divided, which topics it reads. A run whose program differs is refused before anything of it is done,
and told which step differs and in what. No file decides about that.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import polars as pl

from millstream.errors import ConfigError
from millstream.kernels.meaning import exact, said, said_under, spoken
from millstream.kernels.plan import JobPlan
from millstream.views.running import how_to_reset

STATE_FORMAT = 3
"""The version of all that manifests and runs hold. State of another version is refused."""

_OF_ONE = {"aggregates": "aggregate", "fields": "field", "keys": "key", "columns": "column"}
_INSIDE = frozenset({"aggregation", "emission", "watermark", "marks", "panes", "session"})
_FOLLOWS = frozenset({"schema", "is", "result_schema", "empty", "row_schema", "keys", "types"})


@dataclass(frozen=True)
class StoredProgram:
    """What the home keeps of a job's program, in JSON kinds.

    ``steps`` are the stateful steps by the keys of their state, each with ``name`` and ``meaning``;
    ``outputs`` the meanings of outputs by name.
    ``sharing`` are the numbers by which the work is divided; ``versions`` those of what describes
    expressions and functions.
    """

    labels: list[int]
    steps: dict[str, Any]
    outputs: dict[str, Any]
    topics: list[str]
    frames: int
    sharing: dict[str, int] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    format: int = STATE_FORMAT

    @classmethod
    def of(cls, plan: JobPlan, sharing: Mapping[str, int]) -> StoredProgram:
        """Give what is to be kept of a plan."""
        program = plan.program
        steps = {
            key: {"name": meaning.name, "meaning": meaning.description}
            for key, meaning in program.steps.items()
        }
        versions = {
            "polars": pl.__version__,
            "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        }
        return cls(
            list(plan.bucket_labels),
            steps,
            dict(program.outputs),
            list(program.topics),
            program.frames,
            dict(sharing),
            versions,
        )

    def to_json(self) -> str:
        """Give the text in which the home keeps it."""
        return json.dumps(vars(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> StoredProgram:
        """Read back what :meth:`to_json` wrote."""
        return cls(**json.loads(text))


def require_same(
    stored: StoredProgram, now: StoredProgram, folder: Path, *, same_expressions: bool
) -> None:
    """Make sure that a program may go on with the state of another one.

    Args:
        folder: Where the state is, for the error.
        same_expressions: Expressions and functions that read the same are the same, as the user
            says, although another version of polars or Python describes them otherwise.

    Raises:
        ConfigError: it may not; the message says what differs, step by step.
    """
    if stored.format != now.format:
        raise ConfigError(
            f"The state in {folder} has format {stored.format}, and this version of millstream works "
            f"on format {now.format}. Go on with the version that made it, or begin anew from the log: "
            f"{how_to_reset(folder)}."
        )
    _require_same_buckets(stored, now, folder)
    found = [*_different_inputs(stored, now), *_different_steps(stored, now)]
    if found:
        raise ConfigError(
            f"The program is not the one that the state in {folder} was made by: "
            f"{'; '.join(found)}. Undo the change, give the app another name to build its state anew "
            f"beside the old, or begin anew: {how_to_reset(folder)}."
        )
    unclear = _unclear(stored, now)
    if unclear and not same_expressions:
        raise _cannot_tell(stored, now, unclear)
    _require_told_apart(stored, now, folder)


def _require_told_apart(stored: StoredProgram, now: StoredProgram, folder: object) -> None:
    """Make sure that of steps which read alike, and are described otherwise, each finds its own state.

    Their keys go by the order of their descriptions, which is another one now.
    """
    kin: dict[str, set[str]] = {}
    moved: dict[str, str] = {}
    for key, step in now.steps.items():
        stem = key.partition("#")[0]
        kin.setdefault(stem, set()).add(exact(step["meaning"]))
        if exact(_of(stored, key)) != exact(step["meaning"]):
            moved[stem] = step["name"]
    alike = [name for stem, name in moved.items() if len(kin[stem]) > 1]
    if alike:
        raise ConfigError(
            f"Several steps read like {', '.join(map(repr, alike))} and do something else, and another "
            f"version of polars or Python describes them otherwise than when the state in {folder} was "
            "made: which state is whose cannot be told. Run the app with the versions before, or give it "
            "another name to build its state anew."
        )


def _unclear(stored: StoredProgram, now: StoredProgram) -> list[str]:
    """Name what reads the same as before and is described otherwise by other versions."""
    meanings = {now.steps[key]["name"]: (_of(stored, key), _of(now, key)) for key in now.steps}
    if stored.versions != now.versions:
        meanings |= {
            name: (stored.outputs[name], now.outputs[name])
            for name in now.outputs
            if name in stored.outputs and reads_the_same(stored.outputs[name], now.outputs[name])
        }
    return [name for name, (was, after) in meanings.items() if exact(was) != exact(after)]


def reads_the_same(was: Any, now: Any) -> bool:
    """Whether descriptions are equal but for what text does not show."""
    return exact(spoken(was)) == exact(spoken(now))


def _of(program: StoredProgram, key: str) -> Any:
    return program.steps[key]["meaning"]


def _require_same_buckets(stored: StoredProgram, now: StoredProgram, folder: Path) -> None:
    if stored.labels == now.labels:
        return
    count, asked = len(stored.labels), len(now.labels)
    raise ConfigError(
        f"The app's state in {folder} is divided into {count} buckets and the app asks for "
        f"{asked}{' others' if count == asked else ''}. Use buckets={count}, or give the app another "
        "name to build its state anew."
    )


def _different_inputs(stored: StoredProgram, now: StoredProgram) -> Iterator[str]:
    if stored.topics != now.topics:
        was, reads = (", ".join(map(repr, p.topics)) or "none" for p in (stored, now))
        yield f"it read the topics {was}, and reads {reads}"
    if stored.frames != now.frames:
        yield f"it read {stored.frames} DataFrames of Spark, and reads {now.frames}"


def _different_steps(stored: StoredProgram, now: StoredProgram) -> list[str]:
    """Say what differs, step by step; what merely follows from a step above is left out."""
    upgraded = stored.versions != now.versions
    telling: list[str] = []
    following: list[str] = []
    for was, after in _pairs(stored, now):
        if was is None or after is None:
            is_new = was is None
            name = (after or was or {})["name"]
            telling.append(f"step {name!r} {'is new' if is_new else 'is no longer there'}")
            continue
        meanings = was["meaning"], after["meaning"]
        if upgraded and reads_the_same(*meanings):
            continue  # it may well be the same: see `_unclear`
        found = list(_differences(*meanings))
        causes = [one for one in found if not one.follows]
        texts = ", and ".join(one.text for one in causes or found)
        (telling if causes else following).append(f"step {after['name']!r}: {texts}")
    return telling or following


def _pairs(stored: StoredProgram, now: StoredProgram) -> Iterator[tuple[Any, Any]]:
    """Put together what was and is of each step that differs: by key, then by name, then as listed."""
    for key in stored.steps.keys() & now.steps.keys():
        if exact(_of(stored, key)) != exact(_of(now, key)):
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


def _cannot_tell(stored: StoredProgram, now: StoredProgram, unclear: Sequence[str]) -> ConfigError:
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
        "run(same_expressions=True), or --same-expressions; otherwise run it with the version before, or give the app "
        "another name to build its state anew."
    )


# ── differences ─────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Difference:
    """What differs, in words. ``follows``: it does so because something else does."""

    text: str
    follows: bool = False


def _differences(was: Any, now: Any) -> Iterator[_Difference]:
    """Say how two descriptions differ."""
    for key in dict.fromkeys([*was, *now]):
        before, after = was.get(key), now.get(key)
        if exact(before) == exact(after):
            continue
        if key == "reads":
            yield from _reads_differ(before, after)
        elif key in _OF_ONE:
            yield from _named_differ(_OF_ONE[key], before or {}, after or {}, key in _FOLLOWS)
        elif key in _INSIDE and isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from _differences(before, after)
        else:
            text = _changed(key, before, after)
            yield _Difference(text, key in _FOLLOWS)


def _named_differ(
    word: str,
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    follows: bool,  # noqa: FBT001
) -> Iterator[_Difference]:
    differing = [n for n in dict.fromkeys([*was, *now]) if was.get(n) != now.get(n)]
    for name in differing:
        before, after = was.get(name), now.get(name)
        # That another field is read follows from what reads it.
        only_read = word == "field" and (before is None or after is None)
        text = _changed(f"{word} {name!r}", before, after, absent="not there")
        yield _Difference(text, follows or only_read)
    if not differing:
        yield _Difference(f"the order of {word}s was {', '.join(was)}, is {', '.join(now)}")


def _changed(key: str, was: Any, now: Any, *, absent: str = "none") -> str:
    what = key.removesuffix("_us")
    before, after = (absent if one is None else said_under(key, one) for one in (was, now))
    if before == after:
        return (
            f"{what} reads {after} as before, but its options or the code of its functions differ"
        )
    return f"{what} was {before}, is {after}"


def _reads_differ(was: Sequence[Any], now: Sequence[Any]) -> Iterator[_Difference]:
    if len(was) != len(now):
        yield _Difference(f"it had {len(was)} inputs, and has {len(now)}")
        return
    for before, after in zip(was, now, strict=True):
        yield from _ways_differ(before, after)


def _ways_differ(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[_Difference]:
    if "union" in was and "union" in now:
        yield from _reads_differ(was["union"], now["union"])
    elif {*was} != {*now}:
        yield _Difference(f"it read {_origin(was)}, and reads {_origin(now)}")
    else:
        told = {name: item for name, item in was.items() if name != "steps"}
        for difference in _differences(told, {name: now[name] for name in told}):
            above = difference.text.startswith(("rows of", "late rows of"))
            yield _Difference("a step above it has changed", True) if above else difference
    if "steps" in was and exact(was["steps"]) != exact(now["steps"]):
        yield from _steps_differ(was["steps"], now["steps"])


def _origin(way: Mapping[str, Any]) -> str:
    if "topic" in way:
        return f"the topic {way['topic']!r}"
    return "a DataFrame" if "dataframe" in way else "a union" if "union" in way else "another step"


def _steps_differ(was: Sequence[Any], now: Sequence[Any]) -> Iterator[_Difference]:
    before, after = [exact(one) for one in was], [exact(one) for one in now]
    for tag, i, j, k, m in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        gone, come = ", ".join(map(said, was[i:j])), ", ".join(map(said, now[k:m]))
        if tag == "insert":
            yield _Difference(f"{come} is new on the way to it")
        elif tag == "delete":
            yield _Difference(f"{gone} is no longer on the way to it")
        elif tag == "replace":
            yield _Difference(_changed("on the way to it", gone, come))
