"""Cases H, I and J of one topic: joins within an interval, look-ups, joins as of a time.

Both sides are rows of the case's topic: ``part`` says which, ``id`` is what the row says, ``key`` what is
compared. So one clock goes for both, as Kafka's stream time does.

Sources: Kafka Streams, the documentation's table of joins, KStreamKStreamOuterJoinTest,
AbstractJoinIntegrationTest; Flink, IntervalJoinITCase, TemporalJoinITCase; RisingWave,
event_time_temporal_join.slt; DuckDB, test_asof_join, test_asof_join_integers, test_asof_join_inequalities.
"""

from __future__ import annotations

from dataclasses import replace

import polars as pl
from cases.case import LONG, Answer, Case, Reach, event, when

import millstream as ms
from millstream import testing

LEFT, RIGHT = 0, 1
HOUR = 3600.0
NO_VALUE = pl.col("id").is_null()


def sides(stream, name):
    return [
        stream.filter(pl.col("part") == side, name=f"{name}/side {side}").select(
            "at", "key", "id", name=f"{name}/columns {side}"
        )
        for side in (LEFT, RIGHT)
    ]


def row(seconds, side, says, key="k"):
    return event(seconds, None, key, id=says, part="lr".index(side))


# ── H: within an interval ───────────────────────────────────────────────────────────────────────


def interval(case_id, says, rows, within, *joins, spread=False, **options):
    """A case of several joins: ``(how, the pairs and rows alone)`` or with options of the join besides."""
    named = {f"{how}{n}": (how, own, pairs) for n, (how, pairs, own) in enumerate(joins)}

    def build(stream, name):
        left, right = sides(stream, name)
        return {
            output: left.join(
                right, "key", within=within, how=how, name=f"{name}/{output}", **own
            ).select("id", "id_right", name=f"{name}/{output} ids")
            for output, (how, own, _) in named.items()
        }

    expected = {
        output: Answer("id id_right", [pair(said) for said in pairs], "net")
        for output, (_, _, pairs) in named.items()
    }
    return Case(case_id, says, rows, build, expected, spread=spread, **options)


def pair(said):
    """Return the values of ``A+b``, ``A+null``, ``null+b``."""
    return tuple(None if value == "null" else value for value in said.split("+"))


MATRIX = [
    (3, "l", "A"), (4, "r", "a"), (5, "l", "B"), (6, "r", "b"), (9, "l", "C"), (10, "r", "c"),
    (14, "r", "d"), (15, "l", "D"), (40, "l", "E"), (61, "l", "F"), (82, "r", "f"), (103, "l", "G"),
]  # fmt: skip
PAIRS = [f"{left}+{right}" for left in "ABCD" for right in "abcd"]
AROUND = ("-15 seconds", "15 seconds")
HALF = ("-5 seconds", "6 seconds")
BOUNDS = [row(0.999, "l", "L0.999", "A"), row(1, "l", "L1", "A"), row(12, "l", "L12", "A")]
BOUNDS += [row(12.001, "l", "L12.001", "A"), row(5, "l", "L5", None)]
# The left row is from 6 seconds before to 5 after.
BOUNDS += [row(7, "r", "R7", "A"), row(6, "r", "R6", None)]
AT_MINUTES = [row(60 * at, "l", name, name) for at, name in enumerate("abcdefg")]
TO_20 = [
    row(0.029, "l", "A0", "0"),
    row(0.031, "r", "12", "2"),  # waits until 36
    row(0.036, "l", "A1", "1"),
    row(0.037, "l", "A2", "1"),
    row(0.044, "r", "13", "3"),  # waits until 49
    row(0.044, "r", "14", "4"),
    row(0.049, "l", "A3", "1"),  # A0 waits until 49, too
]


def counts_behind(stream, name):
    left, right = sides(stream, name)
    joined = left.join(
        right, "key", within=("0 seconds", "5 seconds"), how="left", name=f"{name}/join"
    )
    windows = joined.window(ms.tumbling("10 seconds"), name=f"{name}/windows")
    matched = ms.count(pl.col("id_right").is_not_null())
    return {"out": windows.agg(rows=ms.count(), matched=matched)}


INTERVALS = [
    interval(
        "H1",
        "Kafka's matrix of joins",
        [row(*given) for given in MATRIX],
        AROUND,
        ("inner", PAIRS, {}),
        ("left", [*PAIRS, "E+null", "F+null"], {}),
        ("right", [*PAIRS, "null+f"], {}),
        ("full", [*PAIRS, "E+null", "F+null", "null+f"], {}),
        lateness=5,
    ),
    interval(
        "H1",
        "exactly at the close nothing comes out",
        [row(40, "l", "E"), row(60, "l", "F")],
        AROUND,
        ("left", [], {}),
        lateness=5,
    ),
    interval(
        "H1",
        "a moment later it does",
        [row(40, "l", "E"), row(60, "l", "F"), row(60.001, "l", "G")],
        AROUND,
        ("left", ["E+null"], {}),
        lateness=5,
    ),
    interval(
        "H1",
        "Spark: five minutes are over at six and not at five",
        AT_MINUTES,
        ("0 seconds", "5 minutes"),
        ("left", ["a+null"], {}),
    ),
    interval(
        "H2",
        "a row alone and a later pair",
        [row(0, "l", "A0", "0"), row(0.1, "l", "A1", "1"), row(0.11, "r", "11", "1")],
        ("-100 ms", "100 ms"),
        # That it comes before them holds in one partition and one bucket: test_interval_join_published.
        ("full", ["A0+null", "A1+11"], {}),
    ),
    *(
        interval(
            "H3",
            f"rows alone wait for the grace, seen at {last}",
            [
                row(0, "l", "A0", "0"),
                row(0, "r", "11", "1"),
                row(0.101, "l", "A1", "1"),
                row(0.101, "r", "10", "0"),
                row(last, "r", "100", "0"),
            ],
            ("-100 ms", "100 ms"),
            ("full", alone, {}),
            lateness=0.01,
        )
        for last, alone in ((0.110, []), (0.112, ["A0+null", "null+11"]))
    ),
    interval(
        "H4",
        "each side waits for its own partners, at 49",
        TO_20,
        ("-5 ms", "20 ms"),
        ("full", ["null+12"], {}),
    ),
    interval(
        "H4",
        "each side waits for its own partners, at 50",
        [*TO_20, row(0.050, "l", "A4", "1")],
        ("-5 ms", "20 ms"),
        ("full", ["null+12", "A0+null", "null+13", "null+14"], {}),
    ),
    *(
        interval(
            "H5",
            says,
            rows,
            HALF,
            ("inner", ["L1+R7", "L12+R7"], {}),
            ("inner", ["L1+R7", "L12+R7", "L5+R6"], {"nulls_equal": True}),
            delay=60,
            spread=True,
        )
        for says, rows in (("bounds and null keys", BOUNDS), ("the other way round", BOUNDS[::-1]))
    ),
    interval(
        "H6",
        "an eager row alone is taken back once",
        [row(0, "l", "l"), row(3, "r", "r"), row(4, "r", "r2")],
        ("0 seconds", "10 seconds"),
        ("left", ["l+r", "l+r2"], {"emit": "eager"}),
    ),
    interval(
        "H6",
        "an eager row without a partner stays",
        [row(0, "l", "l"), row(11, "r", "r"), row(4, "l", "l2")],
        ("0 seconds", "10 seconds"),
        ("left", ["l+null", "l2+r"], {"emit": "eager"}),
        delay=60,
    ),
    Case(
        "H7",
        "windows behind a left join",
        [
            row(5, "l", "alone", "1"),
            row(12, "l", "paired", "2"),
            row(15, "r", "partner", "2"),
            row(60, "l", "last", "3"),
        ],
        counts_behind,
        {"out": Answer("window_end rows matched", [(10, 1, 0), (20, 1, 1)], "net")},
    ),
]

# ── H1 again: all pairs of Kafka's 23 inputs ────────────────────────────────────────────────────


def within_ten_seconds():
    """Return a case of its stream-stream joins, with seconds for milliseconds. Rows without a value are in no pair."""
    rows = [given.values for given in kafka_inputs() if given.values.id is not None]
    pairs = [f"{left}+{right}" for left in "ABCDEF" for right in "abcdef"]
    joins = [(how, pairs, {}) for how in ("inner", "left", "right", "full")]
    within = ("-10000 seconds", "10000 seconds")
    return interval(
        "H1", "Kafka's inputs, all pairs", rows, within, *joins, delay=HOUR, spread=True
    )


# ── I: what the table says now ──────────────────────────────────────────────────────────────────

KAFKA = "L∅1 R∅2 LA3 Ra4 LB5 Rb6 L∅7 R∅8 LC9 Rc10 R∅11 L∅12 R∅13 Rd7 LD6 L∅2 R∅3 Re14 LE15 L∅10 R∅9 LF4 Rf3"


def kafka_inputs():
    """Return the 23 inputs in their order, a millisecond after each other; null rows of the stream are left out."""
    rows = []
    for number, said in enumerate(KAFKA.split()):
        side, value, at = said[0].lower(), said[1], int(said[2:])
        if (side, value) != ("l", "∅"):
            given = row(at, side, None if value == "∅" else value)
            rows.append(testing.Row(given, at=when(number / 1000)))
    return rows


def arriving(*rows):
    """Return rows that arrive at milliseconds: ``(millisecond, seconds, side, says)``."""
    return [testing.Row(row(*given), at=when(ms / 1000)) for ms, *given in rows]


def looked_up(case_id, says, rows, found, *, hows=("left",), order="offset"):
    def build(stream, name):
        left, right = sides(stream, name)
        table = right.table("key", order=order, deleted=NO_VALUE, name=f"{name}/table")
        return {
            how: left.lookup(table, "key", how=how, name=f"{name}/{how}").select(
                "id", "id_right", name=f"{name}/{how} ids"
            )
            for how in hows
        }

    pairs = [pair(said) for said in found]
    answers = {
        how: Answer("id id_right", [p for p in pairs if how == "left" or p[1] is not None], "net")
        for how in hows
    }
    return Case(case_id, says, rows, build, answers, delay=HOUR)


LATEST = ["A+null", "B+a", "C+null", "D+d", "E+e", "F+null"]
VERSION_5, VERSION_3 = (0, 5, "r", "c"), (1, 3, "r", "u")
LOOKUPS = [
    looked_up("I", "Kafka's inputs in the latest table", kafka_inputs(), LATEST, hows=("left", "inner")),
    *(
        looked_up(
            "I2",
            f"a row that arrives at {at} sees {seen}",
            # One partition: of one millisecond the order in the log decides nothing.
            arriving(*sorted([(0, 1, "r", "old"), (2, 2, "r", "new"), (at, 5, "l", "row")])),
            [f"row+{seen}"],
        )
        for at, seen in ((1, "old"), (2, "new"), (3, "new"))
    ),
    *(
        looked_up(
            "I3",
            f"a lower sequence, by {order}",
            arriving(VERSION_5, VERSION_3, (2, 6, "l", "row")),
            [f"row+{seen}"],
            order=order,
        )
        for order, seen in (("time", "c"), ("offset", "u"))
    ),
]  # fmt: skip

# ── I, J: as of the time of the row ─────────────────────────────────────────────────────────────


def as_of(case_id, says, rows, answers, *, joins, spread=True, **options):
    def build(stream, name):
        left, right = sides(stream, name)
        table = right.table("key", deleted=NO_VALUE, name=f"{name}/table")
        return {
            output: left.join_asof(
                right if "quotes" in own else table,
                "key",
                name=f"{name}/{output}",
                **{option: value for option, value in own.items() if option != "quotes"},
            ).select("id", "id_right", name=f"{name}/{output} ids")
            for output, own in joins.items()
        }

    expected = {
        output: Answer("id id_right", [pair(said) for said in pairs], "net")
        for output, pairs in answers.items()
    }
    options = {"delay": HOUR, **options}
    return Case(case_id, says, rows, build, expected, spread=spread, **options)


def minutes(at, side, says, key):
    return row(60 * at, side, says, key)


RATES = [
    minutes(0, "r", "102", "US Dollar"),
    minutes(0, "r", "114", "Euro"),
    minutes(0, "r", "1", "Yen"),
    minutes(0, "r", "702", "RMB"),
    minutes(1, "r", "118", "Euro"),
    minutes(2, "r", "106", "US Dollar"),
    minutes(1, "r", "106", "US Dollar"),
    minutes(2, "r", None, "RMB"),
]
ORDERS = [
    minutes(0.5, "l", "1", "Euro"),
    minutes(1.5, "l", "2", "US Dollar"),
    minutes(1.5, "l", "3", "RMB"),
    minutes(3, "l", "4", "Euro"),
    minutes(3, "l", "5", "RMB"),
    minutes(4, "l", "7", None),
]
WITH_RATE = ["1+114", "2+106", "3+702", "4+118"]
FIVE = "5 seconds"
QUOTES = {
    "plain": {"quotes": True},
    "strict": {"quotes": True, "allow_equal": False},
    "backward": {"quotes": True, "tolerance": FIVE},
    "forward": {"quotes": True, "tolerance": FIVE, "direction": "forward"},
    "nearest": {"quotes": True, "tolerance": FIVE, "direction": "nearest"},
}
# The times of quotes, and which one a trade at 10 has by each join.
TRADES = [
    ([10], {"plain": 10, "strict": None, "backward": 10, "forward": 10, "nearest": 10}),
    ([9, 10, 11], {"plain": 10, "strict": 9, "backward": 10, "forward": 10, "nearest": 10}),
    ([5], {"plain": 5, "strict": 5, "backward": 5, "forward": None, "nearest": 5}),
    ([4], {"plain": 4, "strict": 4, "backward": None, "forward": None, "nearest": None}),
    ([15], {"plain": None, "strict": None, "backward": None, "forward": 15, "nearest": 15}),
    ([16], {"plain": None, "strict": None, "backward": None, "forward": None, "nearest": None}),
    ([5, 15], {"plain": 5, "strict": 5, "backward": 5, "forward": 15, "nearest": 5}),
    ([4, 15], {"plain": 4, "strict": 4, "backward": None, "forward": 15, "nearest": 15}),
    ([8, 11], {"plain": 8, "strict": 8, "backward": 8, "forward": 11, "nearest": 11}),
]


def trades():
    rows, answers = [], {name: [] for name in QUOTES}
    for number, (times, matches) in enumerate(TRADES):
        key = f"k{number}"
        rows += [row(10, "l", key, key), *(row(at, "r", str(at), key) for at in times)]
        for name, match in matches.items():
            answers[name].append(f"{key}+{'null' if match is None else match}")
    return rows, answers


AS_OF = [
    as_of(
        "I",
        "Kafka's inputs as of their times",
        [*(given.values for given in kafka_inputs()[:-1]), Reach(LONG)],
        {"left": ["A+null", "B+a", "C+null", "D+b", "E+e", "F+a"]},
        joins={"left": {}},
        spread=False,  # of two versions of one time the later one in the log counts
    ),
    as_of(
        "I",
        "a version that comes behind its row counts, as the row waits",
        [*(given.values for given in kafka_inputs()), Reach(LONG)],
        {"left": ["A+f", "B+a", "C+null", "D+b", "E+e", "F+a"]},
        joins={"left": {}},
        spread=False,  # of two versions of one time the later one in the log counts
    ),
    as_of(
        "I",
        "Kafka's inputs with a wait of two seconds",
        [given.values for given in kafka_inputs()],
        {"left": ["A+null", "B+a", "C+null"]},  # E waits
        joins={"left": {}},
        spread=False,
        delay=2,
        late=2 + 4,  # D, F; d@7, none@3, none@9, f@3
    ),
    as_of(
        "J1",
        "Flink's rates of currencies",
        [*ORDERS, *RATES, Reach(LONG)],
        {"left": [*WITH_RATE, "5+null", "7+null"], "inner": WITH_RATE},
        joins={"left": {"how": "left"}, "inner": {"how": "inner"}},
    ),
    as_of(
        "J1",
        "a deletion counts from its own time",
        [
            minutes(0, "r", "702", "RMB"),
            minutes(2, "r", None, "RMB"),
            minutes(1.9, "l", "3", "RMB"),
            minutes(2, "l", "5", "RMB"),
            Reach(LONG),
        ],
        {"left": ["3+702", "5+null"]},
        joins={"left": {}},
    ),
    as_of("J5", "times and tolerance, also J6", [*trades()[0], Reach(LONG)], trades()[1], joins=QUOTES),
    as_of(
        "J6",
        "the tolerance is inclusive",
        [row(10, "l", "in", "a"), row(5, "r", "5", "a"), row(10, "l", "out", "b"), row(4, "r", "4", "b"), Reach(LONG)],
        {"backward": ["in+5", "out+null"]},
        joins={"backward": QUOTES["backward"]},
    ),
]  # fmt: skip

# ── J2: orders are updated and deleted before the watermark has passed them, and after it ───────


def orders_as_a_table(stream, name):
    """Orders and their deletions are events; behind the join they are a table again."""
    orders, rates = (
        stream.filter(pl.col("part") == side, name=f"{name}/side {side}").select(
            "key", *own, name=f"{name}/columns {side}"
        )
        for side, own in ((LEFT, ("id", "n")), (RIGHT, ("n",)))
    )
    joined = orders.join_asof(rates.table("key", name=f"{name}/rates"), "key", name=f"{name}/join")
    final = joined.table("id", deleted=pl.col("n").is_null(), unbounded=True, name=f"{name}/final")
    return {"left": final, "inner": final.filter(pl.col("n_right").is_not_null())}


def order(at, number, currency, amount):
    return event(60 * at, amount, currency, id=str(number), part=LEFT)


def rate(at, currency, cents):
    return event(60 * at, cents, currency, part=RIGHT)


WITH_CENTS = [("1", 20, 110), ("2", 10, 120), ("3", 10, None)]
RISINGWAVE = Case(
    "J2",
    "an order that is deleted in time has no row",
    [
        rate(0, "USD", 100), rate(0, "EUR", 110), rate(10, "EUR", 120), rate(20, "USD", 100),
        order(5, 1, "EUR", 10), order(5, 1, "EUR", 20), order(6, 3, "GBP", 10), order(12, 2, "EUR", 10),
        order(7, 4, "EUR", 7), order(7, 4, "EUR", None), order(20, 5, "USD", 1),
        Reach(60 * 19),
        order(5, 1, "EUR", 30), order(12, 2, "EUR", None),  # too late
    ],
    orders_as_a_table,
    {
        "left": Answer("id n n_right", WITH_CENTS),
        "inner": Answer("id n n_right", [found for found in WITH_CENTS if found[2] is not None]),
    },
    delay=HOUR,
    late=2,
)  # fmt: skip

# ── J4: DuckDB's comparisons ────────────────────────────────────────────────────────────────────

WIDE = "36500 days"
DAY = 86400
FIRST, LAST = -14610.0 * DAY, 36159.0 * DAY  # 1930 and 2069
COMPARISONS = {
    ">=": {"quotes": True},
    ">": {"quotes": True, "allow_equal": False},
    "<=": {"quotes": True, "direction": "forward", "tolerance": WIDE},
    "<": {"quotes": True, "direction": "forward", "tolerance": WIDE, "allow_equal": False},
}


def compared(says, probes, events, **answers):
    """A case of rows by their number, with what each comparison gives each of them."""
    rows = [row(at, "l", str(number)) for number, at in enumerate(probes)]
    rows += [row(at, "r", str(value)) for at, value in events]
    nowhere = [event(0, None, "k", id="-10", part=side) for side in (LEFT, RIGHT)]
    rows += [replace(given, at=None) for given in nowhere]  # dead letters
    names = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = {
        name: [f"{n}+{'null' if v is None else v}" for n, v in enumerate(values)]
        for name, values in answers.items()
    }
    return as_of(
        "J4",
        f"DuckDB's {says}",
        [*rows, Reach(100_000 * DAY)],
        found,
        joins={name: COMPARISONS[names[name]] for name in answers},
        delay=73_000 * DAY,
        rule={"future_max": "150000 days"},
        dead=2,
    )


HOURS = [3600 * n for n in range(10)]
DUCKDB = [
    compared(
        "integers",
        range(10),
        [(1, 0), (3, 1), (6, 2), (8, 3), (999_999, 9)],
        ge=[None, 0, 0, 1, 1, 1, 2, 2, 3, 3],
    ),
    compared(
        "inequalities, with the first and the last time",
        [*HOURS, LAST],
        [*((3600 * (n + 1), n) for n in range(4)), (LAST, 9), (FIRST, -1)],
        gt=[-1, -1, 0, 1, 2, 3, 3, 3, 3, 3, 3],
        le=[0, 0, 1, 2, 3, 9, 9, 9, 9, 9, 9],
        lt=[0, 1, 2, 3, 9, 9, 9, 9, 9, 9, None],
    ),
    as_of(
        "J4",
        "DuckDB's null keys, which are equal only where that is said",
        [
            row(5, "l", "1", None), row(5, "l", "3", "A"), row(3, "r", "10", None), row(3, "r", "20", "A"),
            Reach(LONG),
        ],
        {"safe": ["1+10", "3+20"], "plain": ["1+null", "3+20"]},
        joins={"safe": {"quotes": True, "nulls_equal": True}, "plain": {"quotes": True}},
    ),
]  # fmt: skip

CASES = [*INTERVALS, within_ten_seconds(), *LOOKUPS, *AS_OF, RISINGWAVE, *DUCKDB]
