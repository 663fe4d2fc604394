"""Cases I, I1, J3 and K: tables that are joined, grouped and ranked, after each step of a history.

What a table holds after a step is what it holds of a history that ends there. So every case is there once for
each of its steps, all in the same topics: the names of each are its own (``03/ann``). The topics are cut into
batches anywhere, and their keys are spread over all partitions.

Sources: Kafka Streams, the documentation's KTable groupBy, AbstractJoinIntegrationTest,
TableTableJoinIntegrationTest, KTableKTableForeignKeyJoinIntegrationTest; RisingWave, asof_join.slt; DBSP.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import polars as pl
from cases.case import when
from cases.joins import KAFKA

import millstream as ms
from millstream import testing

NAMES = ("id", "k", "ref")  # columns whose values are told apart by step


@dataclass(frozen=True)
class Fact:
    """What the topics of tables hold; ``deleted`` is a deletion that has a time of its own."""

    id: str
    k: str | None = None
    ref: str | None = None
    v: str | None = None
    n: int | None = None
    at: datetime | None = None
    deleted: bool = False


@dataclass(frozen=True)
class Step:
    """What is written, and what each output holds after it; nothing is said of those that are left out.

    ``written``: pairs of a topic and a row, which is a Fact, or the id that a tombstone deletes.
    """

    written: Sequence[tuple[str, Fact | str]]
    expected: Mapping[str, Sequence[tuple[Any, ...]]] = field(default_factory=dict)


@dataclass(frozen=True)
class TableCase:
    """``build`` gets the app, topics by name, and a name for steps; ``columns``: what is looked at, by output."""

    id: str
    says: str
    topics: Sequence[str]
    build: Callable[[Mapping[str, ms.Topic], str], Mapping[str, ms.Table]]
    columns: Mapping[str, str]
    steps: Sequence[Step]


@dataclass(frozen=True)
class TableTrial:
    """A case in topics of so many partitions."""

    case: TableCase
    partitions: int

    @property
    def name(self) -> str:
        words = "".join(c if c.isalnum() else "-" for c in self.case.says)
        return f"{self.case.id}-in-{self.partitions}-{words}"[:60]

    def topic(self, name: str) -> str:
        return f"{self.name}-{name}"

    def view(self, output: str) -> str:
        return f"{self.name}_{output}".replace("-", "_").lower()

    def inputs(self) -> dict[str, list[testing.Row]]:
        """Return every step's history: those of one step in their order, several steps in turns."""
        histories = []
        for number, step in enumerate(self.case.steps):
            if step.expected:
                written = [each for past in self.case.steps[: number + 1] for each in past.written]
                histories.append([(topic, _named(number, row)) for topic, row in written])
        dice, found = random.Random(self.name), {name: [] for name in self.case.topics}
        while histories:
            history = dice.choice(histories)
            topic, row = history.pop(0)
            found[topic].append(row)
            histories = [left for left in histories if left]
        return {self.topic(name): rows for name, rows in found.items()}

    def check(self, out: testing.Result) -> None:
        """Make sure of what each output holds after each step."""
        for output, columns in self.case.columns.items():
            found = _by_step(out[self.view(output)].select(columns.split()))
            for number, step in enumerate(self.case.steps):
                if output in step.expected:
                    wanted = Counter(map(tuple, step.expected[output]))
                    assert found[number] == wanted, (self.name, output, number)


def _named(number: int, row: Fact | str) -> testing.Row:
    def own(name: str | None) -> str | None:
        return None if name is None else f"{number:02}/{name}"

    if isinstance(row, str):
        return testing.Row(None, key=own(row))
    values = vars(row) | {name: own(getattr(row, name)) for name in NAMES}
    return testing.Row(Fact(**values), key=values["id"])


def _by_step(table: pl.DataFrame) -> dict[int, Counter[tuple[Any, ...]]]:
    found: dict[int, Counter[tuple[Any, ...]]] = defaultdict(Counter)
    for row in table.iter_rows():
        parts = [value.split("/", 1) if isinstance(value, str) else value for value in row]
        named = {int(part[0]) for part in parts if isinstance(part, list) and len(part) == 2}
        (number,) = named
        found[number][tuple(part[-1] if isinstance(part, list) else part for part in parts)] += 1
    return found


def app_of(trials: Sequence[TableTrial], *, buckets: int = 2) -> ms.App:
    app = ms.App("tables", log="unused", buckets=buckets)
    for trial in trials:
        topics = {
            name: app.topic(trial.topic(name), Fact, key="id", partitions=trial.partitions)
            for name in trial.case.topics
        }
        outputs = trial.case.build(topics, trial.name)
        assert set(outputs) == set(trial.case.columns), trial.name
        for output, table in outputs.items():
            table.view(
                trial.view(output), key=table.primary_key or trial.case.columns[output].split()
            )
    return app


def run(trials: Sequence[TableTrial], **options: Any) -> None:
    """Run all in one app, and make sure of every answer; ``options`` are those of testing.run."""
    inputs = {topic: rows for trial in trials for topic, rows in trial.inputs().items()}
    out = testing.run(app_of(trials), inputs, **options)
    ledger = out.ledger
    exits = ledger.select("emitted", "held", "late", "dead", "filtered", "duplicate")
    assert (ledger["read"] == exits.sum_horizontal()).all()
    assert (out.late, out.dead.height) == (0, 0)
    for trial in trials:
        trial.check(out)


# ── I: Kafka's joins of two tables, inner, left and full ────────────────────────────────────────

# After the n-th input; "·" is no row. Kafka's lists have what changes, these what the table is then.
UNVERSIONED = {
    "inner": "· · · A-a B-a B-b · · · C-c · · · · D-d · · · E-e · · · F-f",
    "left": "· · A-null A-a B-a B-b · · C-null C-c C-null · · · D-d · · · E-e · · F-null F-f",
    "full": "· · A-null A-a B-a B-b null-b · C-null C-c C-null · · null-d D-d null-d · null-e E-e null-e · "
    "F-null F-f",
}
VERSIONED = {
    "inner": "· · · A-a B-a B-b · · · C-c · · · · · · · · E-e E-e E-e E-e E-e",
    "left": "· · A-null A-a B-a B-b · · C-null C-c C-null · · · · · · · E-e E-e E-e E-e E-e",
    "full": "· · A-null A-a B-a B-b null-b · C-null C-c C-null · · · · · · null-e E-e E-e E-e E-e E-e",
}


def of_one_key(order: str, states: Mapping[str, str]) -> TableCase:
    def build(topics, name):
        left, right = (
            topics[side].table(order=order, time="at", deleted=pl.col("deleted")).select("id", "v")
            for side in "LR"
        )
        return {how: left.join(right, "id", how=how, name=f"{name}/{how}") for how in states}

    steps = []
    for number, said in enumerate(KAFKA.split()):
        side, value, at = said[0], said[1], when(int(said[2:]))
        gone = value == "∅"
        found = {how: _pairs_of(held.split()[number]) for how, held in states.items()}
        steps.append(
            Step([(side, Fact("k", v=None if gone else value, at=at, deleted=gone))], found)
        )
    says = f"Kafka's inputs, two tables by {order}"
    return TableCase("I", says, ["L", "R"], build, dict.fromkeys(states, "id v v_right"), steps)


def _pairs_of(said: str) -> list[tuple[str | None, ...]]:
    values = [None if value == "null" else value for value in said.split("-")]
    return [] if said == "·" else [("k", *values)]


OF_ONE_KEY = [of_one_key("offset", UNVERSIONED), of_one_key("time", VERSIONED)]

# ── I1: Kafka's table of groupBy and aggregate: regions of users, and the lengths of their names ────


def user(name, region):
    return ("users", Fact(name, ref=region, n=len(name)))


def sizes(topics, _name):
    return {"sizes": topics["users"].table().group_by("ref").agg(size=ms.sum("n"))}


def sized(written, **groups):
    return Step([written], {"sizes": list(groups.items())})


I1 = TableCase(
    "I1",
    "Kafka's table of groups",
    ["users"],
    sizes,
    {"sizes": "ref size"},
    [
        sized(user("alice", "E"), E=5),
        sized(user("bob", "A"), A=3, E=5),
        sized(user("charlie", "A"), A=10, E=5),
        sized(
            user("alice", "A"), A=15
        ),  # Kafka keeps E with 0; a group without rows is no row here
        sized(("users", "charlie"), A=8),
        sized(user("bob", "E"), A=5, E=3),
    ],
)

# ── J3: RisingWave's as-of join by numbers, which is maintained; ties go to the smallest key ────


def nearest(how: str) -> Callable[[Mapping[str, ms.Topic], str], Mapping[str, ms.Table]]:
    """The nearest row of the other table is the first one of a top over the join."""

    def build(topics, name):
        t1 = topics["t1"].table().select("id", "ref", "n")
        t2 = topics["t2"].table().select("ref", "n", near="id")
        ahead = how == "inner"
        near = pl.col("n") <= pl.col("n_right") if ahead else pl.col("n") > pl.col("n_right")
        order = [("n_right", "asc" if ahead else "desc"), ("near", "asc")]
        pairs = t1.join(t2, "ref", how=how, where=near, name=f"{name}/join")
        return {"nearest": pairs.top(1, by=order, per="id", rank="place", name=f"{name}/top")}

    return build


def one(v1, v2, v4):
    return ("t1", Fact(str(v4), ref=str(v1), n=v2))


def other(v1, v2, v3):
    return ("t2", Fact(str(v3), ref=str(v1), n=v2))


def near(*written, found=None):
    return Step(written, {"nearest": [] if found is None else [found]})


def as_of_by_numbers(how, *steps):
    columns = {"nearest": "id n n_right near"}
    says = f"RisingWave's maintained as-of join, {how}"
    return TableCase("J3", says, ["t1", "t2"], nearest(how), columns, steps)


J3 = [
    as_of_by_numbers(
        "inner",
        near(one(1, 2, 3)),
        near(other(1, 3, 4), found=("3", 2, 3, "4")),
        near(other(1, 2, 3), found=("3", 2, 2, "3")),
        near(("t1", "3")),
        near(one(2, 3, 4), other(2, 3, 6), found=("4", 3, 3, "6")),
        near(other(2, 3, 7), found=("4", 3, 3, "6")),
        near(other(2, 3, 5), found=("4", 3, 3, "5")),
        near(other(2, 3, 1), other(2, 3, 2), found=("4", 3, 3, "1")),
    ),
    as_of_by_numbers(
        "left",
        near(one(1, 2, 3), other(1, 2, 4), found=("3", 2, None, None)),
        near(other(1, 1, 3), found=("3", 2, 1, "3")),
        near(("t1", "3")),
        near(one(2, 3, 4), *(other(2, 2, n) for n in (6, 7, 5)), found=("4", 3, 2, "5")),
        near(other(2, 2, 1), other(2, 2, 2), found=("4", 3, 2, "1")),
        near(*(("t2", str(n)) for n in (6, 7, 5, 1, 2)), found=("4", 3, None, None)),
    ),
]

# ── K1: a timeline ──────────────────────────────────────────────────────────────────────────────


def timelines(topics, name):
    follows = topics["follows"].table().select("id", follower="k", followed="ref")
    posts = topics["posts"].table().select(post="id", author="ref", ts="n")
    timeline = follows.join(posts, on={"followed": "author"}, name=f"{name}/join")
    newest = timeline.top(2, by="ts", per="follower", rank="place", name=f"{name}/top")
    return {"timeline": timeline, "newest": newest}


def follow(name, follower, followed):
    return ("follows", Fact(name, k=follower, ref=followed))


def post(name, author, ts):
    return ("posts", Fact(name, ref=author, n=ts))


def timeline_step(*written, shown, head):
    return Step(
        written,
        {
            "timeline": [(name,) for name in shown.split()],
            "newest": [*enumerate(head.split(), 1)],
        },
    )


FOLLOW_BOB = follow("f1", "ann", "bob")
K1 = TableCase(
    "K1",
    "a timeline and its newest two",
    ["follows", "posts"],
    timelines,
    {"timeline": "post", "newest": "place post"},
    [
        timeline_step(post("p1", "bob", 10), shown="", head=""),
        timeline_step(FOLLOW_BOB, shown="p1", head="p1"),
        timeline_step(post("p2", "bob", 20), shown="p1 p2", head="p2 p1"),
        timeline_step(("follows", "f1"), post("p3", "bob", 30), shown="", head=""),
        timeline_step(
            FOLLOW_BOB,
            follow("f2", "ann", "cat"),
            post("q1", "cat", 15),
            shown="p1 p2 p3 q1",
            head="p3 p2",
        ),
        timeline_step(("posts", "p2"), shown="p1 p3 q1", head="p3 q1"),
        timeline_step(FOLLOW_BOB, shown="p1 p3 q1", head="p3 q1"),
        timeline_step(follow("f1", "ann", "dan"), shown="q1", head="q1"),
    ],
)

# ── K2: Kafka's joins by a foreign key ──────────────────────────────────────────────────────────


def by_foreign_key(left_order="offset", right_order="offset"):
    def build(topics, name):
        left, right = (
            topics[side].table(order=order, time="at", deleted=pl.col("deleted"))
            for side, order in (("left", left_order), ("right", right_order))
        )
        right = right.select("id", "v")
        left = left.select("id", "ref", "v")
        return {
            how: left.join(right, {"ref": "id"}, how=how, name=f"{name}/{how}")
            for how in ("left", "inner")
        }

    return build


def lhs(number, ref, says="", at=0):
    return ("left", Fact(f"lhs{number}", ref=ref, v=f"lhsValue{number}{says}", at=when(at)))


def rhs(number, says="", at=0):
    return ("right", Fact(f"rhs{number}", v=f"rhsValue{number}{says}", at=when(at)))


def gone(name, at=None):
    """Return a tombstone, or a deletion at a time of its own."""
    side = "left" if name.startswith("l") else "right"
    return (side, name if at is None else Fact(name, at=when(at), deleted=True))


def after(*written, left=None, inner=None):
    """A step: ``left`` and ``inner`` as ``lhs1 rhs1 lhsValue1 rhsValue1``, a line for each row."""
    said = {"left": left, "inner": left if inner is None else inner}
    expected = {
        how: [tuple(None if v == "null" else v for v in line.split()) for line in text.split("; ")]
        if text
        else []
        for how, text in said.items()
        if text is not None
    }
    return Step(written, expected)


ONE, TWO, THREE = (
    "lhs1 rhs1 lhsValue1 rhsValue1",
    "lhs2 rhs2 lhsValue2 rhsValue2",
    "lhs3 rhs1 lhsValue3 rhsValue1",
)
ONE_TO_TWO = "lhs1 rhs2 lhsValue1 rhsValue2"
ALONE = {ref: f"lhs1 {ref} lhsValue1 null" for ref in ("rhs1", "rhs2", "rhs3", "null")}
ONE_ALONE, TWO_ALONE, THREE_ALONE = (
    ALONE["rhs1"],
    "lhs2 rhs2 lhsValue2 null",
    "lhs3 rhs1 lhsValue3 null",
)


def foreign_key(says, *steps, **orders):
    columns = dict.fromkeys(["left", "inner"], "id ref v v_right")
    return TableCase("K2", says, ["left", "right"], by_foreign_key(**orders), columns, steps)


def out_of_order(left_order, right_order):
    """shouldIgnoreOutOfOrderRecordsIffVersioned: a versioned table is one that goes by time."""
    by_time = left_order == "time"
    newest = "lhs1 rhs1 lhsValue1_new {0}; lhs2 rhs1 lhsValue2_new {0}"
    versioned = right_order == "time"
    return foreign_key(
        f"out of order, {left_order} {right_order}",
        Step([rhs(1, at=4), lhs(1, "rhs1", at=3)]),
        after(lhs(2, "rhs1", at=5), left=f"{ONE}; lhs2 rhs1 lhsValue2 rhsValue1"),
        after(gone("lhs2", 6), left=ONE),
        Step([lhs(1, "rhs1", "_ooo", at=2)]),
        after(
            lhs(2, "rhs1", "_ooo", at=2),
            left=ONE
            if by_time
            else "lhs1 rhs1 lhsValue1_ooo rhsValue1; lhs2 rhs1 lhsValue2_ooo rhsValue1",
        ),
        after(gone("lhs1", 2), left=ONE if by_time else "lhs2 rhs1 lhsValue2_ooo rhsValue1"),
        Step([lhs(1, "rhs1", "_new", at=8)]),
        after(lhs(2, "rhs1", "_new", at=8), left=newest.format("rhsValue1")),
        after(
            rhs(1, "_ooo", at=1), left=newest.format("rhsValue1" if versioned else "rhsValue1_ooo")
        ),
        after(
            gone("rhs1", 1),
            left=newest.format("rhsValue1" if versioned else "null"),
            inner=newest.format("rhsValue1") if versioned else "",
        ),
        after(rhs(1, "_new", at=6), left=newest.format("rhsValue1_new")),
        left_order=left_order,
        right_order=right_order,
    )


K2 = [
    foreign_key(
        "from the left, then a left row is deleted",
        after(rhs(1), rhs(2), rhs(3), left=""),
        after(lhs(1, "rhs1"), lhs(2, "rhs2"), left=f"{ONE}; {TWO}"),
        after(lhs(3, "rhs1"), left=f"{ONE}; {TWO}; {THREE}"),
        after(gone("lhs1"), left=f"{TWO}; {THREE}"),
    ),
    foreign_key(
        "a foreign key changes, and back",
        after(rhs(1), rhs(2), left=""),
        after(lhs(1, "rhs1"), left=ONE),
        after(lhs(1, "rhs2"), left=ONE_TO_TWO),
        after(lhs(1, "rhs1"), left=ONE),
    ),
    foreign_key(
        "from the right, then a right row is deleted",
        after(
            lhs(1, "rhs1"),
            lhs(2, "rhs2"),
            lhs(3, "rhs1"),
            left=f"{ONE_ALONE}; {TWO_ALONE}; {THREE_ALONE}",
            inner="",
        ),
        after(rhs(1), left=f"{ONE}; {TWO_ALONE}; {THREE}", inner=f"{ONE}; {THREE}"),
        after(rhs(2), left=f"{ONE}; {TWO}; {THREE}"),
        after(rhs(3), left=f"{ONE}; {TWO}; {THREE}"),
        after(gone("rhs1"), left=f"{ONE_ALONE}; {TWO}; {THREE_ALONE}", inner=TWO),
    ),
    foreign_key(
        "a row without partner is deleted, twice",
        after(lhs(1, "rhs1"), left=ONE_ALONE, inner=""),
        after(gone("lhs1"), left=""),
        after(gone("lhs1"), left=""),
    ),
    foreign_key("what never was is deleted", after(gone("lhs1"), left="")),
    foreign_key(
        "keys that are not there",
        after(lhs(1, "rhs1"), left=ALONE["rhs1"], inner=""),
        after(lhs(1, "rhs2"), left=ALONE["rhs2"], inner=""),
        after(lhs(1, "rhs3"), left=ALONE["rhs3"], inner=""),
        after(rhs(1), left=ALONE["rhs3"], inner=""),
        after(lhs(1, "rhs1"), left=ONE),
        after(lhs(1, "rhs2"), left=ALONE["rhs2"], inner=""),
    ),
    foreign_key(
        "what changes behind an old key is not seen",
        after(rhs(1), rhs(2), left=""),
        after(lhs(1, "rhs1"), left=ONE),
        after(lhs(1, "rhs2"), left=ONE_TO_TWO),
        after(rhs(1, "Delta"), left=ONE_TO_TWO),
    ),
    foreign_key(
        "a foreign key is null, and becomes null",
        after(lhs(2, None), left="lhs2 null lhsValue2 null", inner=""),
        after(gone("lhs2"), left=""),
        after(lhs(1, "rhs1"), left=ONE_ALONE, inner=""),
        after(lhs(1, None), left=ALONE["null"], inner=""),
    ),
    *(out_of_order(left, right) for left in ("time", "offset") for right in ("time", "offset")),
]

# ── K3: a table with itself; what comes and goes ────────────────────────────────────────────────


def with_itself(topics, name):
    table = topics["t"].table().select("id", "ref")
    return {"pairs": table.join(table, {"ref": "id"}, name=f"{name}/join")}


def link(name, ref):
    return ("t", Fact(name, ref=ref))


def pairs(*written, found):
    return Step(written, {"pairs": [tuple(said.split("-")) for said in found.split()]})


K3 = TableCase(
    "K3",
    "a table with itself",
    ["t"],
    with_itself,
    {"pairs": "id ref ref_right"},
    [
        pairs(link("a", "a"), found="a-a-a"),
        pairs(link("b", "a"), found="a-a-a b-a-a"),
        pairs(link("a", "b"), found="a-b-a b-a-b"),
        pairs(link("c", "b"), ("t", "c"), found="a-b-a b-a-b"),  # nets to nothing in one batch
        pairs(("t", "a"), found=""),
        pairs(("t", "b"), link("b", "b"), ("t", "a"), found="b-b-b"),
        pairs(link("a", "b"), ("t", "b"), link("b", "a"), found="a-b-a b-a-b"),
    ],
)

# ── K4: null keys in a full join ────────────────────────────────────────────────────────────────


def full(nulls_equal):
    def build(topics, name):
        one, other = (topics[side].table().select("id", "ref") for side in ("one", "other"))
        other = other.rename({"id": "other"})
        joined = one.join(other, "ref", how="full", nulls_equal=nulls_equal, name=f"{name}/join")
        return {"full": joined.select("id", "other", "ref")}

    return build


def null_keys(nulls_equal, *answers):
    steps = [
        [("one", Fact("a", ref=None)), ("one", Fact("b", ref=None))],
        [("other", Fact("c", ref=None))],
        [("one", Fact("d", ref="x")), ("other", Fact("e", ref="x"))],
        [("other", Fact("e", ref=None))],
        [("one", Fact("a", ref="x")), ("one", "b")],
    ]
    rows = [
        [tuple(None if v == "-" else v for v in said.split(":")) for said in answer.split()]
        for answer in answers
    ]
    given = [Step(written, {"full": found}) for written, found in zip(steps, rows, strict=True)]
    if nulls_equal:  # the null of one history is equal to that of another, so there is one only
        given = [*(Step(written) for written in steps[:-1]), given[-1]]
    says = "null keys, equal" if nulls_equal else "null keys"
    return TableCase(
        "K4", says, ["one", "other"], full(nulls_equal), {"full": "id other ref"}, given
    )


K4 = [
    null_keys(
        False,
        "a:-:- b:-:-",
        "a:-:- b:-:- -:c:-",
        "a:-:- b:-:- -:c:- d:e:x",
        "a:-:- b:-:- -:c:- d:-:x -:e:-",
        "a:-:x d:-:x -:c:- -:e:-",
    ),
    null_keys(
        True,
        "a:-:- b:-:-",
        "a:c:- b:c:-",
        "a:c:- b:c:- d:e:x",
        "a:c:- b:c:- a:e:- b:e:- d:-:x",
        "a:-:x d:-:x -:c:- -:e:-",
    ),
]

CASES = [*OF_ONE_KEY, I1, *J3, K1, *K2, K3, *K4]


def trials_of(cases: Sequence[TableCase], partitions: Sequence[int]) -> list[TableTrial]:
    """Every case in every number of partitions."""
    return [TableTrial(case, count) for case in cases for count in partitions]
