"""The lane of rescales: between any two batches the state may be divided into another number of buckets."""

import random

import pytest

from millstream.testing.kernel_engine import KernelEngine

COUNTS = [1, 2, 3, 4, 7, 16]


def apply(patch: pytest.MonkeyPatch) -> None:
    """Rescale before some of the batches of the kernels' engine."""
    batch = KernelEngine._batch

    def rescaled(engine: KernelEngine, ends):
        dice = random.Random(f"{engine.batch_id} of {engine.plan.buckets.seed}")
        if engine.states and dice.random() < 0.5:
            engine.rescale(dice.choice(COUNTS))
        return batch(engine, ends)

    patch.setattr(KernelEngine, "_batch", rescaled)
