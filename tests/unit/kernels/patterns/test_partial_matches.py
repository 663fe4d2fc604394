"""Partial matches that are looked at: what comes of rows that follow goes on from one of them, and nothing else."""

from datetime import UTC, datetime, timedelta

import pattern_model
import polars as pl
import row_pattern_model
from pattern_run import END, SECOND, NothingToDeclareError, as_table, batch, kernel_of
from row_pattern_run import kernel_of as row_kernel_of
from row_pattern_run import kernel_of_drawn

import millstream as ms
from millstream.kernels.frames import TIME
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import MemoryRunStore
from millstream.kernels.time.watermarks import NO_WATERMARK

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
N = pl.col("n")


def after(kernel, rows, until, key=None):
    """Return the partial matches once the watermark has passed the rows below ``until`` seconds, and nothing later has come."""
    table = as_table(rows)
    table = table.filter(table[TIME] < until * SECOND)
    store = MemoryRunStore()
    stored, _ = batch(kernel, store, None, table, NO_WATERMARK, until * SECOND)
    state = OperatorState.from_message(stored, store)
    wanted = None if key is None else pl.DataFrame({"k": [key]})
    return [*kernel.partial_matches(state, until * SECOND, 7, wanted)]


def bound(one):
    return tuple((row.variable, row.values["row"]) for row in one.rows)


def at(seconds):
    return EPOCH + timedelta(seconds=seconds)


def row(seconds, letter, n=0):
    return {"at": seconds, "v": letter, "n": n}


def is_(letter):
    return pl.col("v") == letter


def test_matches_go_on_from_the_partial_matches_of_random_sequences():
    gone_on = shown = 0
    for seed in range(7000, 7060):
        draw = pattern_model.Draw(seed)
        pattern = draw.pattern()
        if pattern.skip[0] != "none" or pattern.within is None:
            continue
        rows = {key: draw.rows(6) for key in "uvwx"}
        try:
            kernel = kernel_of(pattern_model.declared(pattern))
        except NothingToDeclareError:
            continue
        until = draw.dice.randrange(2, 12)
        found = after(kernel, rows, until)
        shown += len(found)
        for key, own in rows.items():
            mine = {bound(one) for one in found if one.key == {"k": key}}
            read = {place for place, one in enumerate(own) if one["at"] < until}
            for match in pattern_model.model(pattern, own):
                begun = tuple(one for one in match if one[1] in read)
                ends = max(own[place]["at"] for _, place in match)
                by_time = pattern.ends_by_time and own[match[0][1]]["at"] + pattern.within >= until
                if begun and (ends >= until or by_time):
                    assert begun in mine, (seed, key, match, mine)
                    gone_on += 1
        for one in found:
            own = rows[one.key["k"]]
            places = [place for _, place in bound(one)]
            assert places == sorted(set(places))
            assert one.since == at(own[places[0]]["at"])
            assert one.ends == one.since + timedelta(seconds=pattern.within)
            assert one.ends >= at(until), "one whose time is over is none"
            assert one.waits_for
    assert gone_on > 20
    assert shown > 100


def test_the_next_match_of_random_row_patterns_begins_where_a_key_waits():
    begun = 0
    for seed in range(7000, 7030):
        draw = row_pattern_model.Draw(seed)
        pattern = draw.pattern()
        rows = {key: draw.rows(6) for key in "uvwx"}
        try:
            kernel = kernel_of_drawn(pattern)
            meant = {
                key: [
                    start
                    for start, *_ in row_pattern_model.model(pattern, own)
                    if pattern.rows == "one"
                ]
                for key, own in rows.items()
            }
        except (NothingToDeclareError, row_pattern_model.TooManyTriesError):
            continue
        until = draw.dice.randrange(2, 12)
        found = {one.key["k"]: one for one in after(kernel, rows, until)}
        for key, own in rows.items():
            one = found.get(key)
            if one is None:
                continue
            assert one.ends == one.since + timedelta(seconds=pattern.within)
            assert one.ends >= at(until)
            assert one.waits_for
            labels = [variable for variable, _ in [(r.variable, r.time) for r in one.rows]]
            assert set(labels) <= set(kernel.variables)
            # Of matches that begin before it, all are decided; the next one begins there, or later.
            later = [start for start in meant[key] if at(own[start]["at"]) >= one.since]
            begun += bool(later)
    assert begun > 5


def test_what_a_sequence_waits_for_is_said():
    pattern = (
        ms.sequence("cart", is_("c"))
        .followed_by("look", is_("l"))
        .one_or_more()
        .not_followed_by("leave", is_("x"))
        .followed_by("pay", is_("p"))
        .within("1 hour")
    )
    rows = {"x": [row(0, "c"), row(5, "l")], "y": [row(3, "c")]}
    kernel = kernel_of(pattern)
    found = after(kernel, rows, 10)
    by_rows = {(one.key["k"], bound(one)): one for one in found}
    assert by_rows.keys() == {
        ("x", (("cart", 0), ("look", 1))),
        ("y", (("cart", 0),)),
    }
    one = by_rows["x", (("cart", 0), ("look", 1))]
    assert (one.since, one.ends, one.complete) == (at(0), at(3600), False)
    assert one.waits_for == (
        "followed by another 'look', without 'leave' before it",
        "followed by 'pay', without 'leave' before it",
    )
    assert [r.time for r in one.by_variable()["look"]] == [at(5)]
    assert by_rows["y", (("cart", 0),)].waits_for == ("followed by 'look'",)
    assert [one.key for one in after(kernel, rows, 10, "y")] == [{"k": "y"}]
    assert not after(kernel, rows, 10, "z")
    assert not after(kernel, rows, 3700), "their time is over"


def test_a_match_that_waits_for_an_earlier_one_is_complete():
    more = is_("c") & (ms.matched("a", "n").last() < N)
    pattern = ms.sequence("a", is_("a")).followed_by("c", more).within("1 hour").skip("past_last")
    rows = {"x": [row(0, "a", 9), row(1, "a", 1), row(2, "c", 5)]}
    found = {bound(one): one for one in after(kernel_of(pattern), rows, 5)}
    assert {places: one.complete for places, one in found.items()} == {
        (("a", 0),): False,
        (("a", 1), ("c", 2)): True,
    }
    (held,) = [one for one in found.values() if one.complete]
    assert held.waits_for == ("the end of partial matches that began before it",)


def test_the_end_of_within_is_said_where_nothing_may_come():
    pattern = ms.sequence("cart", is_("c")).not_followed_by("pay", is_("p")).within("30 seconds")
    (one,) = after(kernel_of(pattern), {"x": [row(0, "c")]}, 10)
    assert one.waits_for == ("the end of within, without 'pay'",)
    assert one.ends == at(30)


def declared(text, define):
    measures = {"rows": ms.variable()["row"]}
    define = {name: one for name, one in define.items() if name in text}
    return row_kernel_of(ms.row_pattern(text, define=define, within="1 minute"), measures)


def test_what_a_row_pattern_waits_for_is_said():
    define = {name: is_(name.lower()) for name in "ABC"}
    rows = {"x": [row(0, "a"), row(1, "b"), row(2, "b")]}
    (one,) = after(declared("A B+ C", define), rows, 10)
    assert bound(one) == (("A", 0), ("B", 1), ("B", 2))
    assert one.waits_for == ("a row of 'B'", "a row of 'C'")
    assert not one.complete
    (one,) = after(declared("A B+", define), rows, 10)
    assert one.waits_for == ("a row of 'B'", "otherwise it is a match as it is")
    assert one.complete
    (one,) = after(declared("A B+? $", define), rows, 10)
    assert one.waits_for == ("that no row follows", "a row of 'B'")
    assert one.since == at(0)
    assert one.ends == at(60)
    found = after(declared("A B+ C", define), rows, 100)
    assert not found, "its time is over"


def test_a_condition_that_looks_ahead_is_said():
    ahead = {"A": ms.variable("A").next()["n"] > N}
    (one,) = after(declared("A B", ahead), {"x": [row(0, "a", 1)]}, 10)
    assert one.waits_for == ("the rows that the condition of 'A' looks at",)
    assert one.rows == ()
    kernel = row_kernel_of(
        ms.row_pattern("A B", within="1 minute"), {"after": ms.variable("B").next()["row"]}
    )
    (one,) = after(kernel, {"x": [row(0, "a"), row(1, "b")]}, 10)
    assert one.waits_for == ("the rows after it that measures look at",)
    assert one.complete


def test_rows_that_only_later_ones_look_at_are_no_partial_match():
    falls = {"A": is_("a"), "B": ms.variable("B").prev()["n"] > N}
    assert not after(declared("A B", falls), {"x": [row(0, "z", 3)]}, 10)


def test_a_search_that_explodes_costs_its_rows_and_not_the_stream():
    # The sum of B is looked at, so that paths with other labels are others: there are very many.
    define = {"C": ms.variable("B").sum("n") == 10**9}
    kernel = row_kernel_of(
        ms.row_pattern("(A | B)* C", define=define, within="1 hour"),
        {"rows": ms.variable().count()},
    )
    bad = [row(second, "a", 2**second) for second in range(30)]
    rows = {"bad": bad, "good": [row(0, "a", 10**9), row(1, "c")]}
    failed = []
    table = as_table(rows)
    store, stored, before, made = MemoryRunStore(), None, NO_WATERMARK, []
    for start, end in ((0, 14), (14, table.height)):
        until = END if end == table.height else int(table[TIME][end])
        stored, output = batch(kernel, store, stored, table[start:end], before, until, failed)
        made += [] if output is None else output.rows(named=True)
        before = until
    assert [(one["k"], one["rows"]) for one in made] == [("good", 2)]
    assert {one["k"] for one in failed} == {"bad"}
    assert failed[0]["match_start"] == EPOCH
