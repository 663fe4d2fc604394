"""Tables of Debezium's envelope: compared with a database, and what is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from debezium_model import (
    ORDERS,
    SCHEMA,
    TOPICS,
    TRANSACTIONS,
    UNAVAILABLE,
    USERS,
    Change,
    Source,
    Tables,
    boundary,
    states_by_batch,
)
from example_counts import some
from hypothesis import example, given, settings
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError, UserCodeError
from millstream.testing import Row, Tick

VIEWS = ("users", "orders")
SEEDS = st.integers(0, 1 << 32)
BATCHES = st.integers(1, 9)
WHOLE = ms.debezium(transactions=TRANSACTIONS)


def app_of(envelope, **options):
    app = ms.App("shop", log="unused")
    for view, topic in zip(VIEWS, TOPICS, strict=True):
        app.table(topic, SCHEMA, key="id", envelope=envelope, **options).view(view)
    return app


def users_of(rows, envelope="debezium", schema=SCHEMA, **options):
    """Return the view of a table with these records, and the dead letters, after any batches."""
    app = ms.App("shop", log="unused")
    app.table(USERS, schema, key="id", envelope=envelope).view("users")
    out = testing.replay(app, {USERS: rows}, batchings=3, partitions=(1,), **options)
    return out["users"].rows(), out.dead["reason"].to_list()


def by_view(state):
    return dict(zip(VIEWS, (state[topic] for topic in TOPICS), strict=True))


def rows_of(out):
    return {view: sorted(out[view].rows(), key=repr) for view in VIEWS}


def source_of(seed, *, commits=8, restarts=True, **options):
    source = Source(seed, **options)
    source.begin()
    for _ in range(commits):
        source.commit()
        if restarts and source.written and source.dice.random() < 0.2:
            source.restart()
    return source


def record(op, before=None, after=None, *, key=1, headers=None, **parts):
    value = {"before": before, "after": after, "op": op, **parts}
    return Row(value, key=None if key is None else json.dumps({"id": key}))


# ── compared with a database ────────────────────────────────────────────────────────────────


@settings(max_examples=some(12))
@given(seed=SEEDS, batches=BATCHES, partitions=st.sampled_from([1, 4, 7]))
def test_no_batch_shows_a_part_of_a_transaction(seed, batches, partitions):
    source = source_of(seed)
    inputs = {
        topic: [*source.snapshot[topic], Tick("1 second"), *rows]
        for topic, rows in source.topics.items()
    }
    options = {"batches": batches, "partitions": partitions, "seed": seed, "crash": 1}
    out = testing.run(app_of(WHOLE), inputs, **options)
    states = [by_view(state) for state in source.states]
    at = None
    for seen in states_by_batch(out, VIEWS):
        if at is None and seen != states[0]:
            continue  # the snapshot is not in a transaction
        later = [number for number in range(at or 0, len(states)) if states[number] == seen]
        assert later, (seen, states)
        at = later[0]
    assert rows_of(out) == states[-1]
    assert out.dead.height == source.model.dead


@settings(max_examples=some(6))
@given(seed=SEEDS, batches=BATCHES, partitions=st.sampled_from([1, 4, 7]))
def test_transactions_that_overtake_the_snapshot_come_after_it_all_the_same(
    seed, batches, partitions
):
    # A key that moves may take a value from a row of another partition, which is not read yet: a dead letter then.
    source = source_of(seed, moves=False)
    inputs = {topic: source.snapshot[topic] + rows for topic, rows in source.topics.items()}
    options = {"batches": batches, "partitions": partitions, "seed": seed}
    out = testing.run(app_of(WHOLE), inputs, **options)
    assert rows_of(out) == by_view(source.states[-1])


@settings(max_examples=some(6))
@given(seed=SEEDS, batches=BATCHES)
@example(seed=137420, batches=1)  # what is sent again carries from a row that is no longer the last
def test_without_transactions_a_table_of_one_partition_follows_each_record(seed, batches):
    source = source_of(seed, transactions=False)
    inputs = {topic: source.snapshot[topic] + source.topics[topic] for topic in TOPICS}
    out = testing.run(app_of("debezium"), inputs, batches=batches, partitions=1, seed=seed, crash=1)
    model = Tables()
    for topic in TOPICS:
        for row in inputs[topic]:
            model.apply(change_of(topic, row))
    assert rows_of(out) == by_view(model.copy())
    assert out.dead.height == model.dead


@settings(max_examples=some(6))
@given(seed=SEEDS, batches=BATCHES, partitions=st.sampled_from([4, 7]))
def test_without_transactions_what_concerns_several_keys_needs_one_partition(
    seed, batches, partitions
):
    source = source_of(seed, transactions=False)
    inputs = {topic: source.snapshot[topic] + source.topics[topic] for topic in TOPICS}
    out = testing.run(app_of("debezium"), inputs, batches=batches, partitions=partitions, seed=seed)
    model = Tables(ordered=False)
    spoilt = set()
    for topic in TOPICS:
        for row in inputs[topic]:
            change = change_of(topic, row)
            if change.before is not None:  # its new key has the dead letter
                spoilt.add((topic, change.key))
            elif (topic, change.key) in spoilt and change.big is None and change.op == "u":
                model.dead += 1
                continue
            elif not change.tombstone:
                spoilt.discard((topic, change.key))
            model.apply(change)
    assert rows_of(out) == by_view(model.copy())
    assert out.dead.height == model.dead


def change_of(topic, row):
    """Read a record back."""
    if row.values is None:
        return Change(topic, "d", json.loads(row.key)["id"], tombstone=True)
    value = row.values
    before, after = value["before"], value["after"]
    key = (after or before or {}).get("id")
    moved = before["id"] if value["op"] == "u" and before is not None else None
    big = None if after is None or after["big"] == UNAVAILABLE else after["big"]
    carry = value.get("carry_from", {}).get("id")
    return Change(topic, value["op"], key, (after or {}).get("name"), big, moved, carry)


# ── transactions ────────────────────────────────────────────────────────────────────────────

BEGIN, END = boundary("BEGIN", "9:1"), boundary("END", "9:5", {USERS: 1, ORDERS: 1})
OF_BOTH = {
    USERS: [Change(USERS, "c", 1, "a", "A", transaction="9:1", total=1).row()],
    ORDERS: [Change(ORDERS, "c", 2, "b", "B", transaction="9:1", total=2).row()],
    TRANSACTIONS: [BEGIN, END],
}


@pytest.mark.parametrize("missing", [USERS, ORDERS, TRANSACTIONS])
def test_a_transaction_waits_for_all_tables_and_its_end(missing):
    out = testing.run(app_of(WHOLE), {**OF_BOTH, missing: OF_BOTH[missing][:-1]}, batches=3)
    assert rows_of(out) == {"users": [], "orders": []}
    assert out.dead.height == 0


def test_a_join_of_both_tables_shows_no_part_of_a_transaction():
    app = ms.App("shop", log="unused")
    users = app.table(USERS, SCHEMA, key="id", envelope=WHOLE)
    orders = app.table(ORDERS, SCHEMA, key="id", envelope=WHOLE)
    names = {name: f"order_{name}" for name in SCHEMA}
    users.join(orders.rename(names), {"id": "order_id"}, how="left").view("both")
    users_change = [Change(USERS, "c", 1, "a", "A", transaction="9:1", total=1).row()]
    orders_change = [Change(ORDERS, "c", 1, "b", "B", transaction="9:1", total=2).row()]
    for seed in range(some(10)):
        out = testing.run(
            app,
            {USERS: users_change, ORDERS: orders_change, TRANSACTIONS: [BEGIN, END]},
            batches=4,
            seed=seed,
            crash=1,
        )
        assert out.changes("both")["order_name"].to_list() == ["b"]


def test_transactions_are_applied_in_the_order_of_their_ends():
    """Across partitions, too: the later of two rows of a key is that of the later transaction."""
    first = replace(Change(USERS, "c", 1, "a", "A", transaction="5:1", total=1).row(), partition=1)
    second = replace(
        Change(USERS, "u", 1, "b", None, transaction="6:2", total=1).row(), partition=0
    )
    boundaries = [
        boundary("BEGIN", "5:1"),
        boundary("END", "5:1", {USERS: 1}),
        boundary("BEGIN", "6:2"),
        boundary("END", "6:2", {USERS: 1}),
    ]
    app = ms.App("shop", log="unused")
    app.table(USERS, SCHEMA, key="id", envelope=WHOLE).view("users")
    inputs = {USERS: [second, first], TRANSACTIONS: boundaries}
    out = testing.replay(app, inputs, batchings=9, partitions=(2,))
    assert out["users"].rows() == [(1, "b", "A")]


def test_a_dead_letter_counts_for_its_transaction_which_is_applied_without_it():
    bad = Change(USERS, "c", 1, "a", "A", transaction="9:1", total=1).row()
    bad.values["after"]["name"] = 7
    out = testing.replay(app_of(WHOLE), {**OF_BOTH, USERS: [bad]}, batchings=5)
    assert rows_of(out) == {"users": [], "orders": [(2, "b", "B")]}
    assert out.dead["reason"].to_list() == ["field 'name' is 7: not text"]
    assert json.loads(out.dead["value"][0])["after"]["name"] == 7


def test_a_transaction_of_a_record_that_cannot_be_read_at_all_waits():
    junk = Row(b"{", key='{"id": 1}')
    later = {
        **OF_BOTH,
        USERS: [junk, Change(USERS, "c", 3, "c", "C", transaction="10:1", total=1).row()],
        TRANSACTIONS: [BEGIN, END, boundary("BEGIN", "10:1"), boundary("END", "10:1", {USERS: 1})],
    }
    out = testing.run(app_of(WHOLE), later, batches=3)
    assert rows_of(out) == {"users": [], "orders": []}
    assert out.dead.height == 1
    again = later[USERS] + OF_BOTH[USERS]  # it is replayed, corrected
    out = testing.replay(app_of(WHOLE), {**later, USERS: again}, batchings=5)
    assert rows_of(out) == {"users": [(1, "a", "A"), (3, "c", "C")], "orders": [(2, "b", "B")]}


@pytest.mark.parametrize(("transaction", "users"), [("9:1", []), (None, [(1, "a", "A")])])
def test_a_dead_letter_of_a_transaction_is_replayed_without_it(transaction, users):
    """With its id it is one that was sent again, whether the transaction was applied by then or not."""
    good = Change(USERS, "c", 1, "a", "A", transaction="9:1", total=1).row()
    bad = json.loads(json.dumps(good.values))
    bad["after"]["name"] = 7
    good.values["transaction"] = good.values["transaction"] if transaction else None
    rows = [replace(good, values=bad), good]
    out = testing.replay(app_of(WHOLE), {**OF_BOTH, USERS: rows}, batchings=9)
    assert rows_of(out) == {"users": users, "orders": [(2, "b", "B")]}
    assert out.dead.height == 1


def test_a_record_replayed_behind_others_of_its_transaction_counts_for_it():
    first, second = (
        Change(USERS, "c", key, "a", "A", transaction="9:1", total=key).row() for key in (1, 2)
    )
    boundaries = [BEGIN, boundary("END", "9:1", {USERS: 2})]
    rows = [Row(b"{", key='{"id": 1}'), second, first]
    out = testing.replay(
        app_of(WHOLE), {USERS: rows, TRANSACTIONS: boundaries}, batchings=5, partitions=(1,)
    )
    assert rows_of(out)["users"] == [(1, "a", "A"), (2, "a", "A")]


def test_a_transaction_without_a_begin_in_the_log_is_found_by_its_number():
    out = testing.replay(app_of(WHOLE), {**OF_BOTH, TRANSACTIONS: [END]}, batchings=5)
    assert rows_of(out) == {"users": [(1, "a", "A")], "orders": [(2, "b", "B")]}


def test_ids_of_mysql_are_compared_as_a_whole():
    """All of a server's begin alike."""
    server = "24bc7850-2c16-11e6-a073-0242ac110002"
    rows = [
        Change(USERS, "c", n, f"{n}", "", transaction=f"{server}:{n}", total=1).row()
        for n in (1, 2)
    ]
    ends = [boundary("END", f"{server}:{n}", {USERS: 1}) for n in (2, 1)]
    out = testing.replay(app_of(WHOLE), {USERS: rows, TRANSACTIONS: ends}, batchings=5)
    assert [row[1] for row in out["users"].rows()] == ["1", "2"]
    out = testing.run(app_of(WHOLE), {USERS: rows[1:], TRANSACTIONS: ends[1:]})
    assert out["users"].rows() == []


def test_records_of_transactions_in_two_partitions_stop_the_job(monkeypatch):
    run = sys.modules["millstream.testing.run"]
    monkeypatch.setattr(run, "TransactionFormat", ())  # the kit keeps them in one
    rows = [replace(BEGIN, partition=0), replace(END, partition=1)]
    with pytest.raises(UserCodeError, match="partitions 0, 1"):
        testing.run(app_of(WHOLE), {**OF_BOTH, TRANSACTIONS: rows}, partitions=2)


@pytest.mark.parametrize("seed", range(4))
def test_a_table_that_no_end_names_stops_the_job(seed):
    """Else each record that is read behind its END would be dropped, as one of an applied transaction."""
    app = ms.App("shop", log="unused")
    misspelt = ms.debezium(transactions=TRANSACTIONS, collection="public.usres")
    app.table(USERS, SCHEMA, key="id", envelope=misspelt).view("users")
    with pytest.raises(UserCodeError, match=r"'public.usres'.*debezium\(collection=…\)"):
        testing.run(app, {USERS: OF_BOTH[USERS], TRANSACTIONS: [BEGIN, END]}, batches=4, seed=seed)


def test_an_end_that_comes_again_without_a_begin_changes_nothing():
    later = Change(USERS, "c", 3, "c", "C", transaction="10:1", total=1).row()
    boundaries = [END, END, boundary("BEGIN", "10:1"), boundary("END", "10:1", {USERS: 1})]
    inputs = {**OF_BOTH, USERS: [*OF_BOTH[USERS], later], TRANSACTIONS: boundaries}
    out = testing.replay(app_of(WHOLE), inputs, batchings=9)
    assert rows_of(out) == {"users": [(1, "a", "A"), (3, "c", "C")], "orders": [(2, "b", "B")]}


def test_a_record_outside_of_transactions_waits_for_those_before_it():
    rows = [
        *OF_BOTH[USERS],
        Change(USERS, "u", 1, "later", None).row(),  # as from before metadata was asked for
    ]
    app = app_of(WHOLE)
    out = testing.replay(app, {**OF_BOTH, USERS: rows}, batchings=9)
    assert out["users"].rows() == [(1, "later", "A")]
    out = testing.run(app, {USERS: rows})
    assert out["users"].height == 0
    assert out.dead.height == 0


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (Change(USERS, "t", transaction="9:1", total=1), []),
        (Change(USERS, "u", 2, "b", "B", before=1, transaction="9:1", total=1), [(2, "b", "B")]),
    ],
)
def test_a_snapshots_row_that_is_read_late_is_older_than_the_transaction(change, left):
    snapshot = replace(Change(USERS, "r", 1, "a", "A").row(), partition=1)
    first = replace(change.row(), partition=0)
    boundaries = [BEGIN, boundary("END", "9:5", {USERS: 1})]
    app = ms.App("shop", log="unused")
    app.table(USERS, SCHEMA, key="id", envelope=WHOLE).view("users")
    for rows in ([first, Tick("1 second"), snapshot], [snapshot, Tick("1 second"), first]):
        out = testing.run(app, {USERS: rows, TRANSACTIONS: boundaries}, partitions=2)
        assert out["users"].rows() == left


def test_what_is_sent_again_is_counted_as_duplicate_and_not_kept():
    again = {topic: [*rows, Tick("1 second"), *rows] for topic, rows in OF_BOTH.items()}
    out = testing.run(app_of(WHOLE), again)
    tables = out.ledger.filter(pl.col("step").str.starts_with("table by"))
    assert tables.group_by("step").agg(pl.col("duplicate").sum())["duplicate"].to_list() == [1, 1]
    assert rows_of(out) == {"users": [(1, "a", "A")], "orders": [(2, "b", "B")]}
    assert out.dead.height == 0


# ── the envelope ────────────────────────────────────────────────────────────────────────────

ROW = {"id": 1, "name": "a", "big": "A"}
UNKNOWN = {"id": 1, "name": "b", "big": UNAVAILABLE}


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"[1]", "the value is no object, so no envelope of Debezium's"),
        (
            b"{",
            "the value is not JSON: Expecting property name enclosed in double quotes at character 1",
        ),
        (ROW, "the value has no op; Debezium's envelope has c, u, d, r, t, m"),
        ({"op": "x"}, "the value has the op 'x'; Debezium's envelope has c, u, d, r, t, m"),
        ({"op": "c", "after": None}, "the value has no after, and its op must have one"),
        ({"op": "u", "before": ROW}, "the value has no after, and its op must have one"),
        (
            {"op": "c", "after": {"name": "a"}},
            "field 'id' is missing, or null, and is part of the key",
        ),
        ({"op": "c", "after": {**ROW, "id": "x"}}, "field 'id' is \"x\": not a whole number"),
        ({"op": "c", "after": {**ROW, "name": 7}}, "field 'name' is 7: not text"),
        ({"op": "c", "after": ROW, "unavailable": "big"}, "unavailable is no list of names"),
    ],
)
def test_a_wrong_envelope_is_a_dead_letter_with_one_reason_and_the_table_goes_on(value, reason):
    good = record("c", None, {**ROW, "id": 2}, key=2)
    rows, dead = users_of([Row(value, key='{"id": 1}'), good])
    assert dead == [reason]
    assert rows == [(2, "a", "A")]


def test_a_deletion_without_before_takes_the_records_key_and_else_is_a_dead_letter():
    rows = [record("c", None, ROW), record("d"), record("d", key=None)]
    assert users_of(rows) == ([], ["the value has no before, and its op must have one"])


def test_schemas_around_value_and_key_are_taken_off():
    def wrapped(value):
        return {"schema": {"type": "struct", "fields": []}, "payload": value}

    rows = [
        Row(wrapped({"op": "c", "after": ROW}), key=json.dumps(wrapped({"id": 1}))),
        Row(wrapped({"op": "d", "before": None}), key=json.dumps(wrapped({"id": 1}))),
    ]
    assert users_of(rows[:1]) == ([(1, "a", "A")], [])
    assert users_of(rows) == ([], [])


def test_a_tombstone_changes_nothing_behind_its_deletion_and_deletes_where_that_was_compacted():
    tombstone = Row(None, key='{"id": 1}')
    rows = [record("c", None, ROW), record("d", ROW), tombstone, record("c", None, ROW)]
    assert users_of(rows) == ([(1, "a", "A")], [])
    assert users_of([rows[0], tombstone]) == ([], [])
    assert users_of([rows[0], Row(None, key="1")])[1] == ["the key is no JSON object"]


def test_messages_and_unknown_fields_change_nothing():
    rows = [record("c", None, {**ROW, "other": 1}), record("m", message={"prefix": "p"})]
    app = ms.App("shop", log="unused")
    app.table(USERS, SCHEMA, key="id", envelope="debezium").view("users")
    out = testing.run(app, {USERS: rows}, partitions=1)
    assert out["users"].rows() == [(1, "a", "A")]
    step = out.ledger.filter(pl.col("step") == "table by id")
    assert step["filtered"].to_list() == [1]


@pytest.mark.parametrize(
    ("after", "unavailable"),
    [(UNKNOWN, None), ({"id": 1, "name": "b"}, ["big"]), ({**UNKNOWN, "big": None}, ["big"])],
)
def test_an_unavailable_value_is_that_of_the_row_which_is_there(after, unavailable):
    update = record("u", None, after, unavailable=unavailable)
    assert users_of([record("r", None, ROW), update, update]) == ([(1, "b", "A")], [])
    no_row = "the value of 'big' is unavailable, and there is no row to keep it from"
    assert users_of([update]) == ([], [no_row])
    assert users_of([record("c", None, ROW), record("d", ROW), update]) == ([], [no_row])


def test_an_unavailable_value_is_not_taken_from_a_row_that_a_dead_letter_should_have_replaced():
    bad = record("u", None, {"id": 1, "name": 7, "big": "new"})
    rows, dead = users_of([record("c", None, ROW), bad, record("u", None, UNKNOWN)])
    assert rows == [(1, "a", "A")]
    assert dead[1] == (
        "the value of 'big' is unavailable, and the record before it could not be read, so the row may have "
        "another"
    )
    whole = record("u", None, {**ROW, "big": "B"})
    assert users_of([record("c", None, ROW), bad, whole, record("u", None, UNKNOWN)])[0] == [
        (1, "b", "B")
    ]


MOVED = {"id": 2, "name": "a", "big": UNAVAILABLE}


def test_a_changed_key_carries_values_over_if_the_record_says_from_where():
    before = [
        record("c", None, ROW),
        record("d", {"id": 1, "name": None, "big": None}),
        Row(None, key='{"id": 1}'),
    ]
    carried = record("c", None, MOVED, key=2, carry_from={"id": 1})
    assert users_of([*before, carried]) == ([(2, "a", "A")], [])
    rows, dead = users_of([*before, record("c", None, MOVED, key=2)])
    assert (rows, len(dead)) == ([], 1)


def test_an_update_with_another_key_before_deletes_that():
    rows = [record("c", None, ROW), record("u", ROW, MOVED, key=2)]
    assert users_of(rows) == ([(2, "a", "A")], [])


def test_a_truncate_deletes_what_came_before_it():
    rows = [
        record("c", None, ROW),
        record("t", key=None),
        record("c", None, {**ROW, "id": 2}, key=2),
    ]
    assert users_of(rows) == ([(2, "a", "A")], [])
    assert users_of([*rows, record("u", None, UNKNOWN)])[1] != []


def test_without_transactions_a_truncate_of_several_partitions_is_a_dead_letter():
    app = ms.App("shop", log="unused")
    app.table(USERS, SCHEMA, key="id", envelope="debezium").view("users")
    rows = [record("c", None, ROW), replace(record("t", key=None), partition=1)]
    out = testing.run(app, {USERS: rows}, partitions=3)
    assert out["users"].height == 1
    assert "several partitions have no order" in out.dead["reason"][0]


def test_a_key_in_two_partitions_stops_the_job():
    app = ms.App("shop", log="unused")
    app.table(USERS, SCHEMA, key="id", envelope="debezium").view("users")
    rows = [replace(record("c", None, ROW), partition=p) for p in (0, 1)]
    with pytest.raises(UserCodeError, match=r"key 1 in several partitions.*transactions"):
        testing.run(app, {USERS: rows}, partitions=2)


def test_keys_have_several_columns_and_any_name():
    app = ms.App("shop", log="unused")
    schema = {"^a.*$": str, "ab": int, "other": str | None}
    app.table("t", schema, key=["^a.*$", "ab"], envelope="debezium").view("t")
    after = {"^a.*$": "x", "ab": 1, "other": "o"}
    rows = [
        Row({"op": "c", "after": after}, partition=0),
        Row({"op": "c", "after": {**after, "ab": 2}}, partition=0),
        Row({"op": "u", "after": {**after, "other": UNAVAILABLE}}, partition=0),
        Row({"op": "d", "before": {"^a.*$": "x", "ab": 2}}, partition=0),
    ]
    for seed in range(5):
        out = testing.run(app, {"t": rows}, batches=3, seed=seed, crash=1)
        assert out["t"].rows() == [("x", 1, "o")]


# ── what is made of such tables ─────────────────────────────────────────────────────────────


def second(n):
    return datetime(2026, 1, 1, 0, 0, n, tzinfo=UTC)


def at(n, op="u", **row):
    us = int(second(n).timestamp() * 1e6)
    return record(op, None, {**ROW, **row}, source={"ts_us": us, "ts_ms": us // 1000})


@pytest.mark.parametrize("kind", ["join_asof", "lookup"])
def test_streams_are_joined_with_the_rows_as_the_changes_made_them(kind):
    app = ms.App("shop", log="unused")
    users = app.table(USERS, SCHEMA, key="id", envelope="debezium")
    clicks = app.topic("clicks", {"user": int, "at": datetime}, key="user").stream(time="at")
    join = clicks.join_asof if kind == "join_asof" else clicks.lookup
    join(users.filter(pl.col("name") != "gone"), {"user": "id"}).view("clicks", key="at")
    changes = [at(1, "c"), at(5, name="b", big=UNAVAILABLE), at(7, name="gone"), at(9, name="c")]
    asked = [(2, "a", "A"), (5, "b", "A"), (6, "b", "A"), (8, None, None)]
    clicked = [Row({"user": 1, "at": second(n).isoformat()}, at=second(n)) for n, _, _ in asked]
    arrived = [replace(row, at=second(n)) for row, n in zip(changes, (1, 5, 7, 9), strict=True)]
    end = [Row({"user": 1, "at": second(59).isoformat()}, at=second(59))]
    inputs = {USERS: [*arrived, replace(at(59), at=second(59))], "clicks": clicked + end}
    out = testing.replay(app, inputs, batchings=5 if kind == "join_asof" else 0, partitions=(1,))
    found = out["clicks"].filter(pl.col("at") < second(59)).select("at", "name", "big")
    assert found.rows() == [(second(n), name, big) for n, name, big in asked]


def test_a_table_by_transactions_is_looked_up_as_whole_transactions_made_it():
    app = ms.App("shop", log="unused")
    users = app.table(USERS, SCHEMA, key="id", envelope=WHOLE)
    clicks = app.topic("clicks", {"user": int}, key="user").stream()
    clicks.lookup(users, {"user": "id"}).view("clicks", key="user")
    users.join(
        app.static_table(pl.DataFrame({"code": ["a"], "means": ["b"]}), key="code"),
        {"name": "code"},
    ).view("meant")
    ends = [BEGIN, boundary("END", "9:5", {USERS: 1})]
    inputs = {USERS: OF_BOTH[USERS], TRANSACTIONS: ends, "clicks": [{"user": 1}]}
    out = testing.run(app, inputs)
    assert out["clicks"].rows() == [(1, "a", "A")]
    assert out["meant"].rows() == [(1, "a", "A", "b")]
    out = testing.run(app, {**inputs, TRANSACTIONS: ends[:1]})
    assert out["clicks"].rows() == [(1, None, None)]


@pytest.mark.parametrize(
    ("unit", "seconds"),
    [(None, 3.6), ("ms", 3.6), ("us", 3.6), ({"v": "ms"}, 3600), ({"v": "us"}, 3.6)],
)
def test_a_unit_that_is_given_for_a_column_of_durations_is_theirs(unit, seconds):
    """For all columns of times it is not: intervals are in microseconds whatever those are in."""
    row = record("c", None, {"id": 1, "v": 3_600_000})
    schema = {"id": int, "v": timedelta}
    rows, dead = users_of([row], ms.debezium(time_unit=unit), schema)
    assert (rows, dead) == ([(1, timedelta(seconds=seconds))], [])


def test_a_column_may_be_the_time_and_rows_without_it_are_dead_letters():
    app = ms.App("shop", log="unused")
    schema = {"id": int, "since": datetime | None, "big": str | None}
    users = app.table(USERS, schema, key="id", envelope="debezium", time="since")
    users.view("users")
    first = {"id": 1, "since": "2026-01-01T00:00:00Z", "big": "A"}
    rows = [
        record("c", None, first),
        record("u", None, {**first, "since": None, "big": "B"}),
        record("u", None, {**first, "big": UNAVAILABLE}),
    ]
    out = testing.replay(app, {USERS: rows}, batchings=5)
    assert out["users"]["big"].to_list() == ["A"]
    assert sorted(out.dead["reason"].str.slice(0, 13)) == ["no event time", "the value of "]


# ── what is refused ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"envelope": "debezum"}, 'Choose "debezium".*Did you mean'),
        ({"envelope": 7}, r'Give "debezium" or ms.debezium'),
        ({"envelope": "debezium", "order": "time"}, "leave these out"),
        ({"envelope": "debezium", "deleted": pl.lit(value=True)}, "leave these out"),
        ({"envelope": "debezium", "ttl": "1 day"}, "leave these out"),
        ({"envelope": "debezium", "metadata": ("offset",)}, "leave metadata out"),
        (
            {"envelope": "debezium", "format": "bytes", "schema": None, "key": "value"},
            "not plain JSON",
        ),
        ({"envelope": "debezium", "key": "x"}, "x"),
        ({"envelope": "debezium", "key": []}, "key"),
        ({"key": ["id", "name"]}, r"app.topic\('shop.public.users', …\)"),
        ({"envelope": WHOLE, "time": "at"}, "Leave time and watermark out"),
        (
            {"envelope": WHOLE, "watermark": ms.watermark("1 second")},
            "Leave time and watermark out",
        ),
        ({"envelope": ms.debezium(transactions="other.transaction")}, "does not follow"),
        ({"envelope": ms.debezium(scale={"nmae": 2}, decimals="precise")}, "names 'nmae'"),
    ],
)
def test_what_does_not_fit_is_refused_where_it_is_declared(options, message):
    app = ms.App("shop", log="unused")
    given = {"schema": {**SCHEMA, "at": datetime}, "key": "id", **options}
    with pytest.raises(ConfigError, match=message):
        app.table(USERS, given.pop("schema"), **given)


@pytest.mark.parametrize(
    "options",
    [
        {"decimals": "text"},
        {"time_unit": "s"},
        {"time_unit": {"at": "minutes"}},
        {"scale": "2"},
        {"scale": True},
        {"transactions": ""},
        {"transactions": 7},
        {"collection": "public.users"},
        {"placeholder": ""},
    ],
)
def test_options_that_are_not_known_are_refused(options):
    with pytest.raises(ConfigError):
        ms.debezium(**options)


def test_versions_of_a_table_by_transactions_are_not_known():
    app = ms.App("shop", log="unused")
    users = app.table(USERS, SCHEMA, key="id", envelope=WHOLE)
    clicks = app.topic("clicks", {"id": int}, key="id").stream()
    with pytest.raises(ConfigError, match="transactions"):
        clicks.join_asof(users, on="id")


def test_a_topic_of_transactions_is_declared_once():
    app = ms.App("shop", log="unused")
    app.topic(TRANSACTIONS, format="bytes")
    with pytest.raises(ConfigError, match="declared as a topic, too"):
        app.table(USERS, SCHEMA, key="id", envelope=WHOLE)
