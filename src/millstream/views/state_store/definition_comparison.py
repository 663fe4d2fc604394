"""Whether two definitions are the same, also where one was stored by a version that said less.

A definition as a whole has ``passed``: what the columns are that come to it through steps which pass on rows as they came
(`pipeline/definitions.py`). Earlier versions did not say it. A definition without it is compared by the rest, and the
next run stores what it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream.kernels.definition import Description, canonical_text, without_code

PASSED = "passed"


def whole_definition(step: Mapping[str, Any]) -> Description:
    """Return the definition of a step of a stored program, with what is passed on to it."""
    passed = {PASSED: step[PASSED]} if PASSED in step else {}
    return {**step["definition"], **passed}


def same_definition(was: Description, now: Description) -> bool:
    """Return whether two definitions as a whole are the same; of what is not there, whether both are not."""
    texts = [canonical_text(_said_by_both(one, other)) for one, other in ((was, now), (now, was))]
    return texts[0] == texts[1]


def same_text(was: Description, now: Description) -> bool:
    """Return whether definitions as a whole have the same text; options and code may differ."""
    return same_definition(without_code(was), without_code(now))


def passes_on_alike(was: Description, now: Description) -> bool:
    """Return whether what is passed on to a definition is the same to another one, as far as both take it.

    Their paths are the same up to the first one's end.
    """
    passed = [one.get(PASSED) for one in (was, now)]
    if None in passed:
        return True
    before, after = passed
    return len(before) == len(after) and all(
        one["topic"] == other["topic"]
        and one["steps"] == other["steps"]
        and all(field == one["fields"].get(name, field) for name, field in other["fields"].items())
        for one, other in zip(before, after, strict=True)
    )


def _said_by_both(one: Description, other: Description) -> Description:
    if one is None or other is None or (PASSED in one) == (PASSED in other):
        return one
    return {name: said for name, said in one.items() if name != PASSED}
