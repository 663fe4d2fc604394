"""The examples of tables, in process: timelines are those of a plain batch, orders have the rate of their moment."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import polars as pl
import pytest

from millstream import testing
from millstream.testing import Row

FOLDER = Path(__file__).resolve().parents[3] / "examples"


def loaded(name):
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where a dataclass looks its types up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("partitions", [1, 4])
def test_each_timeline_is_that_of_a_plain_batch(partitions):
    example = loaded("timeline")
    follows, posts = example.follow_changes(20, 120, seed=3), example.post_changes(20, 60, seed=3)
    tombstone = posts["author"].is_null()
    inputs = {
        "follows": follows.to_dicts(),
        "posts": [
            Row(None, key=str(row["id"])) if gone else row
            for row, gone in zip(posts.to_dicts(), tombstone, strict=True)
        ],
    }
    for seed in range(3):
        found = testing.run(
            example.pipeline("unused"), inputs, batches=6, partitions=partitions, seed=seed, crash=2
        )
        expected = example.timelines_of(follows, posts)
        assert example.differing(found["timeline"], expected).is_empty()
        assert expected.height > 50


def test_orders_have_the_rate_of_the_moment_in_which_they_were_placed():
    example = loaded("orders")
    found = testing.replay(
        example.pipeline("unused"),
        {"rates": example.RATES, "orders": example.ORDERS},
        partitions=(1,),
    )
    shown = found["orders_in_euros"].select("id", pl.col("in_euros").cast(pl.String))
    assert shown.rows() == [(1, "92.00"), (2, "94.00"), (3, "106.00"), (4, None)]
