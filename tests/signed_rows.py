"""Rows that are taken back, for tests of what takes them: as given to a kernel, and as a pipeline makes them."""

import random
from collections import Counter
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from operator import itemgetter

import polars as pl
from example_counts import histories as of_joins
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream.kernels.frames import DIFF, TIME, visible
from millstream.kernels.operator import BatchContext
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore

START = datetime(1970, 1, 1, tzinfo=UTC)
UNIT = timedelta(microseconds=1)
SCHEMA = {"key": pl.String, "n": pl.Int64, TIME: pl.Int64, DIFF: pl.Int8}


@dataclass
class Event:
    at: datetime
    key: str | None
    n: int = 1


def at(time):
    return START + time * UNIT


def signed_stream(*, lateness=0, late="drop", signed=True):
    """A stream whose rows take others back, as an operator above would declare it."""
    app = ms.App("signed", log="unused")
    stream = app.topic("events", Event, key="key").stream(
        time="at", watermark=ms.watermark(0 * UNIT, idle=None), lateness=lateness * UNIT, late=late
    )
    columns = {name: dtype for name, dtype in stream.columns.items() if name != "at"}
    mode = "retract" if signed else None
    return replace(stream, shape=replace(stream.shape, columns=columns, mode=mode))


@dataclass
class Change:
    """One row: its time, key and value, +1 or -1, and the watermark that it saw."""

    time: int
    key: str
    n: int
    diff: int
    seen: int = -(10**15)


@dataclass
class Kernel:
    """Runs an operator batch by batch on given changes, and stores its state in between as a job does."""

    operator: object
    store: MemoryRunStore
    message: object = None
    watermark: int = -(2**62)

    @classmethod
    def of(cls, stream):
        return cls(stream.node.kernel, MemoryRunStore())

    def batch(self, changes, watermark, *, signed=True, seed=0):
        """Give the rows and counts of a batch; the changes have seen the watermark before it."""
        rows = pl.DataFrame(
            [(c.key, c.n, c.time, c.diff) for c in changes], schema=SCHEMA, orient="row"
        )
        rows = rows if signed else rows.drop(DIFF)
        tables = []
        for change in changes:
            change.seen = self.watermark
        if rows.height:
            prepared = self.operator.prepare(rows, 0)
            assert prepared.late == 0
            tables = [self.operator.pack([prepared.table], 0)]
        state = OperatorState.from_message(self.message, self.store)
        context = BatchContext(self.watermark, watermark, seed=seed)
        result = self.operator.process(state, {0: tables} if tables else {}, context)
        self.message = state.to_message()
        self.watermark = watermark
        exits = {name: n for name, n in result.counts.items() if name != "windows_missed"}
        assert sum(exits.values()) == len(changes)
        return result


def told(rows, *columns):
    """Give the rows of a result as tuples with their sign first; times in microseconds."""
    if rows is None:
        return []
    rows = rows if DIFF in rows.columns else rows.with_columns(pl.lit(1, pl.Int8).alias(DIFF))
    rows = rows.with_columns(pl.col("window_start", "window_end").dt.epoch("us"))
    names = columns or visible(rows.columns)
    return rows.select(DIFF, *names).rows()


def summed(rows):
    """Add up signed rows; what comes to nothing is left out."""
    bag = Counter()
    for sign, *row in rows:
        bag[tuple(row)] += sign
    return Counter({row: n for row, n in bag.items() if n})


@st.composite
def histories(draw, *, late_too=True):
    """Batches of changes that only take back what is there, with the watermark after each."""
    there, batches, watermark = [], [], -5
    for _ in range(draw(st.integers(1, 6))):
        changes = []
        for _ in range(draw(st.integers(0, 6))):
            if there and draw(st.integers(0, 2)) == 0:
                time, key, n = there.pop(draw(st.integers(0, len(there) - 1)))
                changes.append(Change(time, key, n, -1))
            else:
                low = -5 if late_too else max(watermark, -5)
                one = (draw(st.integers(low, low + 40)), draw(st.sampled_from("ab")))
                one = (*one, draw(st.integers(-2, 2)))
                there.append(one)
                changes.append(Change(*one, 1))
        if not late_too:
            there = [one for one in there if one[0] >= watermark]
        watermark += draw(st.sampled_from([0, 1, 3, 9, 25]))
        batches.append((changes, watermark))
    return batches


# ── many histories at once ──────────────────────────────────────────────────────────────────────

# A batch of a hundred histories costs hardly more than one of a single history, so ten thousand of them are a matter
# of minutes: ``MILLSTREAM_JOIN_HISTORIES=10000``, as ``make test-long`` says.
_MANY = of_joins(200)
TOGETHER = min(_MANY, 100)


def of_many_histories(test):
    """Give a test dice: as often as it takes for all histories, each time others."""
    runs = settings(deadline=None, max_examples=-(-_MANY // TOGETHER))
    dice = st.integers(0, 1 << 40).map(lambda seed: random.Random(f"{seed}"))
    return runs(given(dice=dice)(test))


def drawn_watermarks(dice):
    """Draw the watermark after each of some batches."""
    made = [-5]
    for _ in range(dice.randint(2, 6)):
        made.append(made[-1] + dice.choice([0, 1, 3, 9, 25]))
    return made[1:]


def histories_together(dice, watermarks):
    """Draw the changes of each batch, as :func:`histories` does, of many histories, each with keys of its own."""
    batches = [[] for _ in watermarks]
    for history in range(TOGETHER):
        there = []
        for placed in batches:
            # Those of one history stay in their order; between them are those of others.
            for place in sorted(dice.random() for _ in range(dice.randint(0, 6))):
                if there and dice.random() < 1 / 3:
                    change = Change(*there.pop(dice.randrange(len(there))), -1)
                else:
                    row = dice.randint(-5, 35), f"{history}{dice.choice('ab')}", dice.randint(-2, 2)
                    there.append(row)
                    change = Change(*row, 1)
                placed.append((place, change))
    in_order = [[change for _, change in sorted(placed, key=itemgetter(0))] for placed in batches]
    return list(zip(in_order, watermarks, strict=True))
