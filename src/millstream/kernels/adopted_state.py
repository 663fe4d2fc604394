"""The manifests of an edited program: of state that is kept, and of state that was computed beside it.

A step keeps its state under the key of its definition, in the stage and bucket that it has in every program:
the stage follows from what is above the step, which is part of the definition. So the two are put together
key by key, and no run of state is read or written.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from millstream.kernels.plan import JobPlan, OperatorPlan
from millstream.kernels.time.watermarks import NO_WATERMARK, InputClock

Manifests = Mapping[tuple[int, int], bytes]
"""By stage and bucket."""


@dataclass(frozen=True)
class StatePart:
    """Some manifests, and which of their steps are wanted: the key in the new program → the key in these.

    ``moved`` says what runs are called now: an entry of a manifest for an entry.
    """

    manifests: Manifests
    keys: Mapping[str, str]
    moved: Callable[[Sequence[Any]], list[Any]] = list

    def message(self, depth: int, bucket: int, key: str) -> dict[str, Any] | None:
        """Return what a step has in a bucket; None if it has had no batch, or is not of this part."""
        stored = self.manifests.get((depth, bucket))
        if stored is None or key not in self.keys:
            return None
        message: dict[str, Any] | None = json.loads(stored).get(self.keys[key])
        if message is None:
            return None
        return _with_runs(message, self.moved)


def move_manifests(
    manifests: Manifests, moved: Callable[[Sequence[Any]], list[Any]]
) -> dict[tuple[int, int], bytes]:
    """Return manifests whose runs are called otherwise: see :class:`StatePart`."""
    return {
        at: json.dumps(
            {key: _with_runs(message, moved) for key, message in json.loads(manifest).items()},
            separators=(",", ":"),
        ).encode()
        for at, manifest in manifests.items()
    }


def _with_runs(
    message: dict[str, Any], moved: Callable[[Sequence[Any]], list[Any]]
) -> dict[str, Any]:
    runs = {
        family: [moved(entry) for entry in entries] for family, entries in message["runs"].items()
    }
    return {**message, "runs": runs}


def combine_state(
    plan: JobPlan, kept: StatePart, *others: StatePart
) -> dict[tuple[int, int], bytes]:
    """Return the manifests of a plan: each step's state is in one of the parts, or begins empty."""
    made = {}
    for depth, stage in enumerate(plan.stages):
        for bucket in plan.buckets.numbers:
            manifest = {}
            for operator in stage.operators:
                found = [part.message(depth, bucket, operator.key) for part in (kept, *others)]
                there = [message for message in found if message is not None]
                manifest[operator.key] = there[0] if there else _empty(operator, plan.buckets.seed)
            made[depth, bucket] = json.dumps(manifest, separators=(",", ":")).encode()
    return made


def _empty(operator: OperatorPlan, seed: int) -> dict[str, Any]:
    """Return what a step has before its first batch."""
    clocks = {plan.key: InputClock.initial().to_message() for plan in operator.clocks}
    nothing: dict[str, Any] = {"runs": {}, "emitted": {}, "values": {}}
    return {**nothing, "watermark": NO_WATERMARK, "clocks": clocks, "seed": seed}
