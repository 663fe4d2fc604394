"""The Photon example in process: each pair once, each query that was never clicked once, and nothing late."""

import importlib.util
import sys
from pathlib import Path

import pytest

from millstream import testing
from millstream.testing import Row

PATH = Path(__file__).resolve().parents[3] / "examples" / "photon.py"
COUNT = 600


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("photon", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["photon"] = module  # where a dataclass looks its types up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["photon"]


def inputs(example, seed, until=None):
    """Return the rows of both topics that have arrived by then, each in its data center's partition."""
    rows = {"queries": [], "clicks": []}
    for at, event in example.arrivals(COUNT, seed):
        if until is None or at <= until:
            topic = "queries" if isinstance(event, example.Query) else "clicks"
            rows[topic].append(Row(event, partition=example.center_of(event)))
    return rows


def outcome(out):
    clicked, never = out["clicked"], out["never_clicked"]
    pairs, ids = clicked.select("query_id", "result").rows(), never["query_id"].to_list()
    assert out.changes("clicked").height == len(set(pairs))
    assert out.changes("never_clicked").height == len(set(ids))
    return set(pairs), set(ids)


@pytest.mark.parametrize("seed", [1, 2])
def test_the_join_comes_to_what_dictionaries_come_to(example, seed):
    out = testing.run(
        example.pipeline("unused"),
        inputs(example, seed),
        batches=6,
        partitions=example.CENTERS,
        seed=seed,
        crash=3,
    )
    assert out.late == 0
    assert outcome(out) == example.answers(COUNT, seed)


def test_no_query_is_said_to_be_never_clicked_while_a_click_may_come(example):
    out = testing.run(
        example.pipeline("unused"),
        inputs(example, 1, until=example.CUT_OFF[1] - example.timedelta(seconds=1)),
        batches=4,
        partitions=example.CENTERS,
    )
    pairs, never = outcome(out)
    all_pairs, all_never = example.answers(COUNT, 1)
    assert pairs < all_pairs
    assert never < all_never
    # Clicks of up to the cut have come, less the disorder: queries of half an hour before are decided.
    decided_until = example.CUT_OFF[0] - example.HALF_HOUR
    assert out["never_clicked"]["at"].max() <= decided_until


def test_some_clicks_are_too_long_after_their_query_and_one_centers_are_cut_off(example):
    queries, clicks = example.events(COUNT, 1)
    asked = {query.query_id: query.at for query in queries}
    assert any(click.at - asked[click.query_id] > example.HALF_HOUR for click in clicks)
    waited = [at for at, event in example.arrivals(COUNT, 1) if at == example.CUT_OFF[1]]
    assert len(waited) > 5
