"""What tests of aggregates share: rows in, split and merged at random on the way, answers out."""

import polars as pl
import pytest

from millstream.kernels.frames import DIFF, ORDER, TIME
from millstream.kernels.sorted_runs import decode_run, encode_run


def through_state(frame):
    """Write partials as a run and read them back, as state does."""
    table = frame.to_arrow(compat_level=pl.CompatLevel.oldest()).combine_chunks()
    back = pl.from_arrow(decode_run(encode_run(table)))
    assert back.schema == frame.schema
    assert back.equals(frame, null_equal=True)
    return back


def merged(frames, aggregates):
    table = pl.concat(frames)
    out = table.group_by("k").agg(*(e for n, a in aggregates.items() for e in a.merge(n)))
    assert out.schema == table.schema
    return out


@pytest.fixture(scope="session")
def aggregate():
    """Give a function: rows (with the key ``k``) and aggregates in, ``{key: {name: answer}}`` out.

    ``rng`` divides the rows into partials and chooses which are merged with which, and when.
    """

    def run(rows, aggregates, rng, *, changes=False, parts_max=4):
        hidden = {TIME: pl.Int64, ORDER: pl.Int64, DIFF: pl.Int8}
        rows = rows.cast({c: t for c, t in hidden.items() if c in rows.columns})
        if changes:
            aggregates = {name: one.for_changes() for name, one in aggregates.items()}
        bound = {
            name: one.bound(name, lambda e: rows.clear().select(e).dtypes[0])
            for name, one in aggregates.items()
        }
        places = [rng.randrange(rng.randint(1, parts_max)) for _ in range(rows.height)]
        parts = [
            rows.filter(pl.Series([p == place for p in places], dtype=pl.Boolean))
            for place in sorted({0, *places})
        ]
        partials = [
            part.group_by("k").agg(*(e for n, a in bound.items() for e in a.partial(n)))
            for part in parts
        ]
        partials = [through_state(partial) for partial in partials]
        while len(partials) > 1:
            rng.shuffle(partials)
            taken = rng.randint(1, min(3, len(partials)))
            partials = [*partials[taken:], through_state(merged(partials[:taken], bound))]
        done = merged(partials, bound) if rng.random() < 0.5 else partials[0]
        out = done.select("k", *(one.result(name) for name, one in bound.items()))
        assert out.columns == ["k", *bound]
        return {row.pop("k"): row for row in out.to_dicts()}

    return run
