"""Which copies of a state can stand for it."""

from __future__ import annotations

import array
from collections import Counter, OrderedDict, defaultdict, deque
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pydantic
import pytest

from millstream.sourcing.state_twins import are_twins


class Model(pydantic.BaseModel):
    counts: dict[str, list[int]] = {}
    _seen: list[int] = pydantic.PrivateAttr(default_factory=list)


@dataclass(slots=True)
class Slots:
    items: list[Any] = field(default_factory=list)


class Ring:
    def __init__(self) -> None:
        self.me, self.items = self, [1]


GOOD = [
    *({"a": [1, (2, {3})]}, [[1]] * 2, deque([1, [2]]), OrderedDict(a=[1]), Counter("aa")),
    *(defaultdict(list, a=[1]), {"n": float("nan")}, (1, [2]), Model(counts={"a": [1]})),
    *(Slots([1]), Ring(), {}, {"rule": len.__class__}),
]


@pytest.mark.parametrize("state", GOOD, ids=lambda state: type(state).__name__)
def test_a_deep_copy_is_a_twin_and_a_flat_one_is_none(state: Any) -> None:
    assert are_twins(state, deepcopy(state))
    assert not are_twins(state, state)


class NotAll(Ring):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__

    def __getstate__(self) -> dict[str, Any]:
        return {"me": self.me}


def test_a_copy_that_lacks_or_shares_something_is_none() -> None:
    lacking: list[Any] = [NotAll(), np.zeros(1), array.array("i", [1]), {"ring": NotAll()}]
    for state in lacking:
        assert not are_twins(state, deepcopy(state))
    shared = [1]
    pairs: list[tuple[Any, Any]] = [
        ([shared, 1], [shared, 1]),
        ((shared,), (shared,)),
        ([shared, shared], [[1], [1]]),  # a change of one is a change of the other
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([1], [True]),
        ([1], [1, 2]),
        (Slots(shared), Slots(shared)),
    ]
    for state, other in pairs:
        assert not are_twins(state, other)
