"""What a process function does is what the naive model does, however its rows are divided among batches."""

import random
from datetime import timedelta

from hypothesis import given, settings
from hypothesis import strategies as st
from process_model import OUTPUT, SIDE, WORDS, Interpreter, at, model, seconds
from process_run import SCHEMA, SECOND, as_table, kernel_of, run

import millstream as ms
from millstream import testing

KEYS = "xyz"
END_S = 60
ROW = st.tuples(
    st.integers(1, 30),
    st.lists(st.sampled_from(WORDS), min_size=1, max_size=4).map(" ".join),
    st.integers(-3, 9),
)
KEY_ROWS = st.lists(ROW, max_size=8).map(lambda rows: sorted(rows, key=lambda row: row[0]))
ROWS = st.fixed_dictionaries(dict.fromkeys(KEYS, KEY_ROWS))


def meant(rows, end=END_S):
    every, side, failed = [], [], 0
    for key, own in sorted(rows.items()):
        output, other, count = model(own, end)
        every += [(key, *one) for one in output]
        side += [(key, n) for n in other]
        failed += count
    return every, side, failed


def by_key(rows):
    return sorted(rows, key=lambda row: row[0])  # stable: those of each key in their order


@settings(max_examples=40, deadline=None)
@given(ROWS, st.integers(1, 6), st.randoms(use_true_random=False))
def test_any_rows_in_any_batches_give_what_the_model_says(rows, batches, dice):
    kernel = kernel_of(Interpreter(), OUTPUT, side_outputs={"side": SIDE})
    every, side, failed = meant(rows)
    done = run(kernel, as_table(rows), batches, END_S * SECOND, dice)
    assert by_key(done.output(0, tuple(OUTPUT))) == every
    assert by_key(done.output(1, tuple(SIDE))) == side
    assert len(done.failed) == failed


def scripted(seed, count=40):
    """Return rows in the order of time, with two of each time."""
    dice = random.Random(seed)
    return [
        {
            "at": at(1 + number // 2),
            "k": dice.choice(KEYS),
            "do": " ".join(dice.sample(WORDS, 3)),
            "n": dice.randrange(-3, 9),
        }
        for number in range(count)
    ]


def test_the_views_are_the_models_in_any_partitions_batches_and_crashes():
    app = ms.App("p", log="unused")
    watermark = ms.watermark("0 seconds")
    events = app.topic("t", SCHEMA, key="k").stream(
        time="at", watermark=watermark, lateness="3 seconds"
    )
    made = events.process(Interpreter(), by="k", schema=OUTPUT, side_outputs={"side": SIDE})
    made.view("made", key=["k", "what", "state"])
    made.side_output("side").view("side", key=["k", "n"])
    rows = scripted(3)
    end = testing.Watermark("t", at=at(END_S) + timedelta(seconds=3))
    out = testing.replay(app, {"t": [*rows, end]}, batchings=6, crash=2)
    own = {
        key: [(seconds(row["at"]), row["do"], row["n"]) for row in rows if row["k"] == key]
        for key in KEYS
    }
    every, side, failed = meant(own)
    assert set(out["made"].select("k", "what", "state").rows()) == set(every)
    assert set(out["side"].select("k", "n").rows()) == set(side)
    assert 0 < out.dead.height <= failed  # letters of equal timers are one
