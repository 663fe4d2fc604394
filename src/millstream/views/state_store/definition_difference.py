"""What differs between two definitions of a step, said in words: for errors, and for the plan of a change."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any

from millstream.kernels.definition import canonical_text, field_to_text, to_text
from millstream.views.state_store.definition_comparison import PASSED

_SINGULAR = {"aggregates": "aggregate", "fields": "field", "keys": "key", "columns": "column"}
_INLINE = frozenset({"aggregation", "emission", "watermark", "marks", "panes", "session"})
_DERIVED = frozenset({"schema", "class", "result_schema", "empty", "row_schema", "keys", "types"})


@dataclass(frozen=True)
class Difference:
    """A text that says what differs. ``derived``: the difference follows from another one."""

    text: str
    derived: bool = False


def differences(was: Any, now: Any) -> Iterator[Difference]:
    """Yield the differences of two descriptions."""
    for key in dict.fromkeys([*was, *now]):
        before, after = was.get(key), now.get(key)
        if canonical_text(before) == canonical_text(after):
            continue
        if key == "reads":
            yield from _reads_differ(before, after)
        elif key == PASSED:
            above = canonical_text(was.get("reads")) != canonical_text(now.get("reads"))
            yield from _passed_differ(before or [], after or [], above)
        elif key in _SINGULAR:
            yield from _named_differ(_SINGULAR[key], before or {}, after or {}, key in _DERIVED)
        elif key in _INLINE and isinstance(before, Mapping) and isinstance(after, Mapping):
            yield from differences(before, after)
        else:
            text = _changed(key, before, after)
            yield Difference(text, key in _DERIVED)


def _named_differ(
    word: str,
    was: Mapping[str, Any],
    now: Mapping[str, Any],
    follows: bool,  # noqa: FBT001
) -> Iterator[Difference]:
    differing = [n for n in dict.fromkeys([*was, *now]) if was.get(n) != now.get(n)]
    for name in differing:
        before, after = was.get(name), now.get(name)
        # That another field is read follows from what reads it.
        only_read = word == "field" and (before is None or after is None)
        text = _changed(f"{word} {name!r}", before, after, absent="not there")
        yield Difference(text, follows or only_read)
    if not differing:
        yield Difference(f"the order of {word}s was {', '.join(was)}, is {', '.join(now)}")


def _changed(key: str, was: Any, now: Any, *, absent: str = "none") -> str:
    what = key.removesuffix("_us")
    before, after = (absent if one is None else field_to_text(key, one) for one in (was, now))
    if before == after:
        return (
            f"{what} reads {after} as before, but its options or the code of its functions differ"
        )
    return f"{what} was {before}, is {after}"


def _reads_differ(was: Sequence[Any], now: Sequence[Any]) -> Iterator[Difference]:
    if len(was) != len(now):
        yield Difference(f"it had {len(was)} inputs, and has {len(now)}")
        return
    for before, after in zip(was, now, strict=True):
        yield from _edges_differ(before, after)


def _passed_differ(
    was: Sequence[Any],
    now: Sequence[Any],
    follows: bool,  # noqa: FBT001
) -> Iterator[Difference]:
    """Yield what differs in the rows that steps above pass on; nothing where an earlier version has not said it.

    ``follows``: the path differs, too.
    """
    if was and now:
        for one in _reads_differ(was, now):
            text = f"{one.text}, in rows that a step above passes on to it"
            yield Difference(text, one.derived or follows)


def _edges_differ(was: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    if "union" in was and "union" in now:
        yield from _reads_differ(was["union"], now["union"])
    elif {*was} != {*now}:
        yield Difference(f"it read {_origin(was)}, and reads {_origin(now)}")
    else:
        rest = {name: item for name, item in was.items() if name != "steps"}
        for difference in differences(rest, {name: now[name] for name in rest}):
            above = difference.text.startswith(("rows of", "late rows of"))
            yield Difference("a step above it has changed", True) if above else difference
    if "steps" in was and canonical_text(was["steps"]) != canonical_text(now["steps"]):
        yield from _steps_differ(was["steps"], now["steps"])


def _origin(edge: Mapping[str, Any]) -> str:
    if "topic" in edge:
        return f"the topic {edge['topic']!r}"
    return (
        "a DataFrame" if "dataframe" in edge else "a union" if "union" in edge else "another step"
    )


def _steps_differ(was: Sequence[Any], now: Sequence[Any]) -> Iterator[Difference]:
    before, after = [canonical_text(one) for one in was], [canonical_text(one) for one in now]
    for tag, i, j, k, m in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        gone, come = ", ".join(map(to_text, was[i:j])), ", ".join(map(to_text, now[k:m]))
        if tag == "insert":
            yield Difference(f"{come} is new on the way to it")
        elif tag == "delete":
            yield Difference(f"{gone} is no longer on the way to it")
        elif tag == "replace":
            yield Difference(_changed("on the way to it", gone, come))
