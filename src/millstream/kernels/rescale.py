"""Rescaling a job: the manifests of its stages for another number of buckets.

See :mod:`millstream.kernels.state.rescale`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import polars as pl

from millstream.kernels.plan import OperatorPlan, StagePlan
from millstream.kernels.state.keyhash import Hashes, hash_columns
from millstream.kernels.state.rescale import rescale_operator

Manifests = dict[tuple[int, int], bytes]
"""By stage and bucket."""


def rescale_manifests(
    stages: tuple[StagePlan, ...],
    manifests: Mapping[tuple[int, int], bytes],
    before: int,
    after: int,
) -> Manifests:
    """Return the manifests of ``after`` buckets, given those of ``before``. They name the same runs.

    Raises:
        CorruptionError: the buckets of a step differ in what is the same in all.
    """
    made: Manifests = {}
    for depth, stage in enumerate(stages):
        stored = {
            bucket: json.loads(manifests[depth, bucket])
            for bucket in range(before)
            if (depth, bucket) in manifests
        }
        if not stored:
            continue
        rescaled: dict[int, dict[str, Any]] = {bucket: {} for bucket in range(after)}
        for operator in stage.operators:
            parts = {bucket: found[operator.key] for bucket, found in stored.items()}
            for bucket, message in _rescale(operator, parts, before, after).items():
                rescaled[bucket][operator.key] = message
        for bucket, manifest in rescaled.items():
            made[depth, bucket] = json.dumps(manifest, separators=(",", ":")).encode()
    return made


def _rescale(
    operator: OperatorPlan, parts: dict[int, dict[str, Any]], before: int, after: int
) -> dict[int, dict[str, Any]]:
    kernel = operator.kernel
    only = None if kernel.by else _hash_of_no_key(next(iter(parts.values()))["seed"])
    return rescale_operator(
        kernel.name, parts, kernel.layout, before=before, after=after, only=only
    )


def _hash_of_no_key(seed: int) -> Hashes:
    return hash_columns(pl.DataFrame({"": [0]}), (), seed)
