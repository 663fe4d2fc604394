"""Two versions of a view beside each other: against a model that goes through dictionaries, and on an edited app."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime

import polars as pl
import pytest
from edited_app import SOURCE, EditedApp, answers, events, per_kind
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import ConfigError
from millstream.ops.compare import compare
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change
from millstream.ops.view_difference import Threshold, ViewDifference, compare_rows
from millstream.views.runs.control_files import hold_run_lock

KEYS = st.tuples(st.sampled_from([*"abc", None]), st.integers(0, 3))
VALUES = st.tuples(
    st.one_of(st.none(), st.integers(-5, 5)),
    st.one_of(st.none(), st.sampled_from([0.5, 1.5, math.nan])),
    st.one_of(st.none(), st.sampled_from(["x", "y"])),
)
TYPES = {"word": pl.String, "n": pl.Int64, "i": pl.Int64, "f": pl.Float64, "s": pl.String}


def frame(rows):
    return pl.DataFrame([(*key, *values) for key, values in rows.items()], TYPES, orient="row")


def same(one, other):
    both_nan = all(isinstance(each, float) and math.isnan(each) for each in (one, other))
    return both_nan or one == other


@given(st.dictionaries(KEYS, VALUES), st.dictionaries(KEYS, VALUES), st.integers(0, 4))
def test_rows_are_counted_as_a_dictionary_counts_them(before, after, sample):
    found = compare_rows("v", ("word", "n"), frame(before), frame(after), sample_rows=sample)
    both = before.keys() & after.keys()
    differing = {
        key: [not same(*pair) for pair in zip(before[key], after[key], strict=True)] for key in both
    }
    changed = {key for key, columns in differing.items() if any(columns)}
    assert (found.equal, found.changed) == (len(both) - len(changed), len(changed))
    assert (found.added, found.removed) == (len(after.keys() - both), len(before.keys() - both))
    assert [column.changed for column in found.columns] == [
        sum(columns[number] for columns in differing.values()) for number in range(3)
    ]
    sizes = [
        abs(after[key][0] - before[key][0])
        for key in both
        if differing[key][0] and None not in (after[key][0], before[key][0])
    ]
    assert found.columns[0].largest == max(sizes, default=None)
    assert found.columns[2].largest is None  # texts have no size
    shown = [tuple(row["key"].values()) for row in found.sample]
    unequal = changed | (before.keys() ^ after.keys())
    assert len(shown) == len(set(shown)) == min(sample, len(unequal))
    assert set(shown) <= unequal
    for key, row in zip(shown, found.sample, strict=True):
        assert (row["before"] is None) == (key not in before)
        assert (row["after"] is None) == (key not in after)


def test_a_view_without_a_key_has_one_row():
    one, other = (pl.DataFrame({"n": [n]}) for n in (1, 4))
    found = compare_rows("v", (), one, other)
    assert (found.changed, found.columns[0].largest) == (1, 3.0)
    assert found.sample == ({"key": {}, "before": {"n": 1}, "after": {"n": 4}},)
    assert compare_rows("v", (), one.clear(), other).added == 1


def test_values_that_cannot_be_compared_differ_and_sizes_are_exact_for_all_whole_numbers():
    top = 2**63 - 1
    before = pl.DataFrame(
        {"^k.*$": [1, 2, 3], "a": [None, "x", "1"], "b": [top, 0, -1.5], "c": [-top, top, 0]},
        schema_overrides={"b": pl.Float64},
    )
    after = pl.DataFrame(
        {
            "^k.*$": [1, 2, 3],
            "a": [None, 1, 1],
            "b": [math.nan, -0.0, math.inf],
            "c": [top, top - 1, 0],
        },
        schema_overrides={"a": pl.Int64},
    )
    found = compare_rows("v", ("^k.*$",), before, after)
    sizes = {one.name: (one.changed, one.largest) for one in found.columns}
    assert sizes == {"a": (2, None), "b": (2, math.inf), "c": (2, float(2 * top))}
    assert (found.equal, found.changed, len(found.sample)) == (0, 3, 3)
    assert found.sample[1]["after"] == {"a": 1, "c": top - 1}
    nans = pl.DataFrame({"k": [1], "a": [math.nan], "b": [1]})
    (sampled,) = compare_rows("v", ("k",), nans, nans.with_columns(b=pl.lit(2))).sample
    assert sampled["before"] == {"b": 1}
    with pytest.raises(ConfigError, match="the old version has several rows of one key k"):
        compare_rows("v", ("k",), pl.concat([nans, nans]), nans)
    with pytest.raises(ConfigError, match="the key has a as Int64, not String"):
        compare_rows("v", ("a",), before, after)


def test_columns_of_one_version_are_named_and_times_differ_in_seconds():
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    before = pl.DataFrame({"k": [1], "at": [noon], "old": [1]})
    after = pl.DataFrame({"k": [1], "at": [noon.replace(minute=2)], "new": [1]})
    found = compare_rows("v", ("k",), before, after)
    assert (found.new_columns, found.old_columns) == (("new",), ("old",))
    assert [(one.name, one.largest, one.mean) for one in found.columns] == [("at", 120.0, 120.0)]
    with pytest.raises(ConfigError, match="cannot be paired: the key k, new has new"):
        compare_rows("v", ("k", "new"), before, after)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("changed > 2", False),
        ("changed >= 2", True),
        ("changed > 19%", True),
        ("changed > 20%", False),
        ("changed >= 20 %", True),
        ("removed > 0", False),
        ("added>=3", True),
        ("different > 49.9%", True),
    ],
)
def test_a_condition_is_of_rows_or_of_a_share(text, holds):
    assert Threshold.parse(text).holds(ViewDifference("v", 5, 2, 3, 0)) == holds


def test_of_a_view_without_rows_no_share_is_exceeded():
    assert not Threshold.parse("changed > 0%").holds(ViewDifference("v", 0, 0, 0, 0))


@pytest.mark.parametrize(
    "text", ["changed", "changd > 1", "changed < 1", "changed > x", "changed > 1 > 2"]
)
def test_what_is_no_condition_is_refused(text):
    with pytest.raises(ConfigError, match=r"is no condition\. Give changed, added"):
        Threshold.parse(text)
    with pytest.raises(ConfigError, match="Did you mean 'changed'"):
        Threshold.parse("changd > 1")


# ── of an edited app ────────────────────────────────────────────────────────────────────────


@pytest.fixture
def edited(tmp_path):
    made = EditedApp(tmp_path, 4)
    made.create()
    made.append(events(100, 3))
    made.run(made.write())
    return made


def test_an_edit_is_compared_at_the_position_of_the_live_view_while_the_app_runs(edited):
    rows = events(100, 3)
    app = edited.write(("FACTOR = 2", "FACTOR = 3"))
    with hold_run_lock(app.folder, 1):
        (view,) = compare(app).views
        assert (view.view, view.changed, view.equal) == ("per_kind", 2, 0)
        weights = {row[2]: row[3] for row in per_kind(rows)}
        assert view.columns[1].largest == max(weights.values()) / 2
        more = events(60, 4, first=100)
        edited.append(more)
        edited.run(edited.write())
        app = edited.write(("FACTOR = 2", "FACTOR = 3"))
        found = compare(app)
        assert found.positions == {"per_kind": {"clicks": {str(n): 40 for n in range(4)}}}
        (sampled,) = [row for row in found.views[0].sample if row["key"]["kind"] == "show"]
        now = {row[2]: row[3] for row in per_kind([*rows, *more])}
        assert sampled["before"]["weight"] == now["show"]
        assert sampled["after"]["weight"] == now["show"] // 2 * 3
        assert edited.views(app) == answers([*rows, *more])  # nothing of the app has changed
    assert deploy(app).records == 0  # it goes on with what was computed
    assert plan_change(app).verdict == "keeps"


def test_what_adds_a_column_is_equal_in_the_others(edited):
    app = edited.write(("n=ms.count(), cost", 'n=ms.count(), top=ms.max("cost"), cost'))
    views = {view.view: view for view in compare(app).views}
    assert set(views) == {"per_ad", "busy"}
    assert views["per_ad"].new_columns == ("top",)
    assert all(view.different == 0 and view.equal > 0 for view in views.values())


def test_an_edit_that_rebuilds_nothing_has_nothing_to_compare(edited):
    found = compare(edited.write())
    assert (found.views, found.new) == ((), ())


def test_the_command_says_what_differs_and_its_code_follows_the_conditions(edited, call):
    edited.write(("FACTOR = 2", "FACTOR = 3"))
    answer = call(
        "compare", str(edited.file), "--fail-if", "changed > 1%", "--fail-if", "added > 0"
    )
    assert answer.code == 3
    assert (
        "per_kind: 2 rows: 0 equal, 2 changed, 0 added, 0 removed (100.00% different)" in answer.out
    )
    assert "column 'weight' differs in 2 rows, by up to" in answer.out
    assert answer.out.splitlines()[-1] == "fails: per_kind: changed > 1%"
    answer = call("compare", str(edited.file), "--json", "--fail-if", "added > 0")
    values = json.loads(answer.out)
    assert (answer.code, values["failing"]) == (0, [])
    assert values["views"][0]["changed"] == 2
    assert call("compare", str(edited.file), "--fail-if", "much").code == 2


def test_what_is_written_elsewhere_is_named_as_not_compared_if_it_changes(tmp_path):
    source = SOURCE.replace(
        'per_kind.view("per_kind")\n',
        f'per_kind.view("per_kind")\nper_kind.dataset({str(tmp_path / "rows")!r})\n',
    )
    edited = EditedApp(tmp_path, 1, source=source)
    edited.create()
    edited.append(events(60, 5))
    edited.run(edited.write())
    found = compare(edited.write(("FACTOR = 2", "FACTOR = 3")))
    assert ([view.view for view in found.views], {*found.not_compared}) == (
        ["per_kind"],
        {"dataset(rows)"},
    )
    assert compare(edited.write()).not_compared == {}
