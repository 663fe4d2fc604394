"""Failing rows: exactly those that fail alone, wherever they stand; and what is said of them."""

import json
from datetime import UTC, datetime, timedelta

import polars as pl
import pytest
from example_counts import some
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import UserCodeError
from millstream.kernels.errors.user_code import (
    HOPELESS_ROWS_MAX,
    HOPELESS_ROWS_MIN,
    UserCode,
    error_reason,
    failing_rows,
    rows_as_json,
    source_location,
)

CODE = UserCode("parse", "app.py:3")


def table_of(values):
    return pl.DataFrame({"v": values}, schema={"v": pl.String})


def parsed(table):
    return table.with_columns(pl.col("v").str.to_integer())


def is_good(value):
    return value is None or value.lstrip("-").isdigit()


VALUES = st.lists(st.sampled_from(["1", "-22", "x", "", None, "3.5"]), max_size=90)


@given(values=VALUES)
@settings(max_examples=some(200), deadline=None)
def test_the_failing_rows_are_those_that_fail_alone(values):
    done = CODE.run(parsed, table_of(values))
    good = [v for v in values if is_good(v)]
    assert done.failing["v"].to_list() == [v for v in values if not is_good(v)]
    assert done.passing["v"].to_list() == good
    if done.result is None:
        assert not good
    else:
        assert done.result["v"].to_list() == [None if v is None else int(v) for v in good]
    assert len(done.reasons) == done.failing.height
    assert all(reason.startswith("ComputeError: ") for reason in done.reasons)


@pytest.mark.parametrize(("count", "bad"), [(101, 1), (1000, 3), (4096, 7)])
def test_finding_few_failing_rows_takes_few_calls(count, bad):
    calls = []

    def counted(table):
        calls.append(table.height)
        return parsed(table)

    values = ["1"] * count
    for number in range(bad):
        values[number * count // bad] = "x"
    assert CODE.run(counted, table_of(values)).failing.height == bad
    assert len(calls) <= 2 + 2 * bad * count.bit_length()


def test_a_table_without_failing_rows_is_run_once_and_not_copied():
    calls = []
    table = table_of(["1"])
    assert CODE.run(calls.append, table).passing is table
    assert len(calls) == 1


@pytest.mark.parametrize("count", [HOPELESS_ROWS_MIN + 1, HOPELESS_ROWS_MAX, 5000])
def test_code_that_fails_on_each_of_many_rows_stops(count):
    with pytest.raises(UserCodeError, match="each of more than 100 rows"):
        CODE.run(parsed, table_of(["x"] * count))


@pytest.mark.parametrize(
    "values", [["x"] * HOPELESS_ROWS_MIN, ["x"] * 999 + ["1"], ["1"] + ["x"] * 2000]
)
def test_code_that_fails_on_few_rows_or_not_on_all_goes_on(values):
    assert CODE.run(parsed, table_of(values)).failing.height == values.count("x")


def test_where_the_first_thousand_fail_no_more_are_tried():
    calls = []

    def counted(table):
        calls.append(table.height)
        raise LookupError

    with pytest.raises(UserCodeError):
        CODE.run(counted, table_of(["x"] * 100_000))
    assert len(calls) < 2 * HOPELESS_ROWS_MAX + 50


def shout(value):
    if value == "x":
        raise LookupError("no such word\nmore of it")
    return json.loads(value) if value == "{" else value


SHOUT = pl.col("v").map_elements(shout, return_dtype=pl.String)


def test_to_stop_names_step_file_line_row_and_remedy():
    code = UserCode("shout", "app.py:3", "stop")
    with pytest.raises(UserCodeError) as caught:
        code.run(lambda t: t.with_columns(SHOUT), table_of(["a", "x", "x"]))
    said = str(caught.value)
    line = shout.__code__.co_firstlineno + 2
    assert said.startswith("step 'shout' failed: LookupError: no such word, at ")
    assert f"{__file__}:{line} in shout." in said
    assert 'The row: {"v":"x"}. It is declared at app.py:3.' in said
    assert said.endswith('on_error="dead-letter".')
    assert caught.value.step == "shout"


def test_an_error_deep_in_a_library_is_placed_where_the_user_called_it():
    with pytest.raises(json.JSONDecodeError) as caught:
        shout("{")
    line = shout.__code__.co_firstlineno + 3
    assert source_location(caught.value) == f"{__file__}:{line} in shout"


@pytest.mark.parametrize(
    ("function", "kind"),
    [(json.loads, "JSONDecodeError"), (lambda text: text.encode("ascii"), "UnicodeError")],
)
def test_errors_that_polars_cannot_raise_anew_are_named(function, kind):
    call = pl.col("v").map_elements(lambda text: str(function(text)), return_dtype=pl.String)
    done = CODE.run(lambda t: t.with_columns(call), table_of(["1", "ü{"]))
    assert done.reasons == [kind]
    assert done.passing.height == 1


def test_a_function_that_fails_only_on_several_rows_together_is_no_step():
    def jealous(table):
        if table.height > 1:
            raise LookupError("I want to be alone")

    with pytest.raises(UserCodeError, match="No single row makes it fail"):
        CODE.run(jealous, table_of(["1", "2"]))

    def shy(table):
        if table.height > 2 or "x" in table["v"]:
            raise LookupError("too many")

    with pytest.raises(UserCodeError, match="No single row makes it fail"):
        CODE.run(shy, table_of(["1", "2", "x", "4"]))


def test_errors_that_no_row_can_be_blamed_for_stop_and_ours_are_not_hidden():
    with pytest.raises(UserCodeError, match=r"ColumnNotFoundError.*Fix the expression or function"):
        CODE.run(lambda t: t.select("w"), table_of(["1"]))
    with pytest.raises(AttributeError):  # raised within Millstream: there is no such frame
        CODE.run(rows_as_json, None)


def test_reasons_are_one_line():
    assert error_reason(ValueError("a.\nb")) == "ValueError: a"
    assert error_reason(LookupError()) == "LookupError"


def test_rows_become_json_whatever_they_hold():
    rows = pl.DataFrame(
        {
            "at": [datetime(2026, 1, 1, tzinfo=UTC)],
            "took": [timedelta(seconds=1.5)],
            "raw": [b"\xff"],
            "list": [[{"a": 1}]],
            "none": [None],
            "__split": [7],
        }
    )
    assert json.loads(rows_as_json(rows)[0]) == {
        "at": "2026-01-01T00:00:00+00:00",
        "took": 1.5,
        "raw": "/w==",
        "list": [{"a": 1}],
        "none": None,
    }


def test_times_that_python_has_not_become_json_too():
    far = pl.Series([10**18, 0], dtype=pl.Int64).cast(pl.Datetime("us", "UTC"))
    rows = pl.DataFrame({"at": far, "n": [1, 2]}).with_columns(all=pl.concat_list("at"))
    first, last = map(json.loads, rows_as_json(rows))
    assert first == {"at": "+33658-09-27 01:46:40.000000+00:00", "all": [10**18], "n": 1}
    assert last["n"] == 2


def test_failing_rows_can_stop_at_the_first():
    calls = []

    def counted(table):
        calls.append(1)
        return parsed(table)

    (first,) = failing_rows(counted, table_of(["1", "x"] * 500), first_only=True)
    assert first.position == 1
    assert len(calls) < 20
