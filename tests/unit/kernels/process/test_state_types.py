"""State of each type comes back as it was written; values of other types are refused where they are given."""

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

import polars as pl
import pytest
from process_run import SCHEMA, SECOND, Run, as_table, kernel_of

import millstream as ms
from millstream.errors import ConfigError
from millstream.kernels.process.values import frozen

VALUES = {
    "decimal": (pl.Decimal(20, 2), Decimal("1.25"), "text"),
    "instant": (pl.Datetime("us", "UTC"), datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1)),  # noqa: DTZ001
    "local": (pl.Datetime("us"), datetime(2026, 1, 1), 7.5),  # noqa: DTZ001
    "duration": (pl.Duration("us"), timedelta(seconds=3), "3"),
    "date": (pl.Date, date(1969, 1, 1), "today"),
    "clock": (pl.Time, time(1, 2), "1:02"),
    "bytes": (pl.Binary, b"x\0", "x"),
    "text": (pl.String, "é", 1),
    "float": (pl.Float64, float("inf"), "1"),
    "small": (pl.Int8, -128, 128),
    "large": (pl.UInt64, 2**64 - 1, -1),
    "short": (pl.Float32, 0.5, "1"),
    "array": (pl.Array(pl.Int64, 2), [1, 2], [1]),
    "fields": (pl.Struct({"a": pl.Int64}), {"a": None}, {"b": 1}),
    "listed": (pl.List(pl.Time), [time(1), None], ["1:00"]),
    "flag": (pl.Boolean, True, 1),
    "struct": (pl.Struct({"a": pl.List(pl.Int64)}), {"a": [1, 2]}, {"a": ["x"]}),
}


class OfEachType(ms.ProcessFunction):
    for name, (dtype, _, _) in VALUES.items():
        locals()[f"value_{name}"] = ms.value_state(dtype)
        locals()[f"list_{name}"] = ms.list_state(dtype)
        locals()[f"map_{name}"] = ms.map_state(pl.String, dtype)

    def on_row(self, context, row):
        for name, (_, value, _) in VALUES.items():
            if row["do"] == "write":
                setattr(context.state, f"value_{name}", value)
                getattr(context.state, f"list_{name}").extend([value, None])
                getattr(context.state, f"map_{name}")["x"] = value
            else:
                assert getattr(context.state, f"value_{name}") == frozen(value), name
                assert getattr(context.state, f"list_{name}") == [frozen(value), None], name
                assert dict(getattr(context.state, f"map_{name}")) == {"x": frozen(value)}, name
        context.emit({"k": row["k"]})


def test_values_of_all_types_come_back_from_state():
    run = Run(kernel_of(OfEachType(), {"k": pl.String}))
    for second, do in ((1, "write"), (3, "read")):
        run.batch(as_table({"x": [(second, do, 0)]}), (second + 1) * SECOND)
    assert run.failed == []
    assert [table.height for table in run.outputs] == [1, 1]


class Rounds(ms.ProcessFunction):
    short = ms.value_state(pl.Float32)
    coarse = ms.value_state(pl.Duration("ms"))

    def on_row(self, context, row):
        if row["do"] == "write":
            context.state.short = 0.1
            context.state.coarse = timedelta(microseconds=1999)
        context.emit({"k": f"{context.state.short} {context.state.coarse}"})


def test_what_a_type_cannot_hold_is_rounded_when_it_is_written_and_not_between_batches():
    run = Run(kernel_of(Rounds(), {"k": pl.String}))
    run.batch(as_table({"x": [(1, "write", 0), (1, "read", 0)]}), 2 * SECOND)
    run.batch(as_table({"x": [(3, "read", 0)]}), 5 * SECOND)
    assert len({row for table in run.outputs for row in table["k"]}) == 1


class Wrong(ms.ProcessFunction):
    for name, (dtype, _, _) in VALUES.items():
        locals()[f"value_{name}"] = ms.value_state(dtype)

    def on_row(self, context, row):
        setattr(context.state, f"value_{row['do']}", VALUES[row["do"]][2])


def test_a_value_of_another_type_is_a_failure_of_its_row_that_says_so():
    run = Run(kernel_of(Wrong(), {"k": pl.String}))
    run.batch(as_table({"x": [(1, name, 0) for name in VALUES]}), 2 * SECOND)
    for name, (*_, reason) in zip(VALUES, run.failed, strict=True):
        assert reason.startswith(f"The state 'value_{name}' is ")
        assert ", and is declared as " in reason


NO_ROUNDING = {
    "a whole number that is no float": (pl.Float64, 2**53 + 1),
    "one beyond all floats": (pl.Float64, 10**400),
    "one that is no short float": (pl.Float32, 2**24 + 1),
    "a float that would be infinite": (pl.Float32, 1e300),
    "a decimal that is no number": (pl.Decimal(10, 2), Decimal("NaN")),
}


@pytest.mark.parametrize("case", NO_ROUNDING)
def test_a_number_is_not_made_another_one(case, capfd):
    dtype, value = NO_ROUNDING[case]

    class Row(ms.ProcessFunction):
        held = ms.value_state(dtype)

        def on_row(self, context, row):
            context.state.held = value

    run = Run(kernel_of(Row(), {"k": pl.String}))
    run.batch(as_table({"x": [(1, "", 0)]}), 2 * SECOND)
    ((*_, reason),) = run.failed
    assert reason.startswith(f"The state 'held' is {value!r}, and is declared as ")
    assert "panicked" not in capfd.readouterr().err


class Emits(ms.ProcessFunction):
    def on_row(self, context, row):
        given = [{"k": row["k"]}, {"k": 1}, {"key": "x"}, {"k": "x", "m": 1}, 7][row["n"]]
        context.emit(given, to={0: None, 1: None}.get(row["n"]))
        context.emit(given, to="nowhere")


def test_what_is_emitted_must_be_as_declared():
    run = Run(kernel_of(Emits(), {"k": pl.String}))
    run.batch(as_table({"x": [(1, "emit", n) for n in range(5)]}), 2 * SECOND)
    said = [reason for *_, reason in run.failed]
    assert "emitted to 'nowhere', and the side outputs are (none)" in said[0]
    assert "The column 'k' of a row that is emitted is 1, and is declared as String" in said[1]
    assert "has the columns key, and is declared with k" in said[2]
    assert "has the columns k, m, and is declared with k" in said[3]
    assert "7 is emitted, which is neither a dict" in said[4]
    assert run.outputs == []


def declared(function=None, *, schema=None, app=None, **options):
    stream = (app or ms.App("p", log="unused")).topic("t", SCHEMA, key="k").stream(time="at")
    return stream.process(function or Emits(), by="k", schema=schema or {"k": pl.String}, **options)


class BadDefault(Emits):
    count = ms.value_state(pl.Int64, default="none")


class BadVersion(Emits):
    version = 0


class Coded(Emits):
    kind = ms.value_state(pl.Categorical)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: declared(lambda row: row), "Give an instance of a class of yours that derives"),
        (lambda: declared(Emits), "Give an instance"),
        (lambda: declared(schema={"__k": pl.String}), "reserved"),
        (lambda: declared(side_outputs=["a"]), "Give the schema of each by its name"),
        (lambda: declared(side_outputs={"": {"k": str}}), "Give a text"),
        (lambda: declared(BadDefault()), "The default of the state 'count' is 'none'"),
        (lambda: declared(BadVersion()), "version of the function"),
        (lambda: declared(Coded()), "Cast it to pl.String"),
        (lambda: declared().side_output("other"), "has no side output 'other'"),
        (lambda: declared().filter(pl.col("k") == "x").side_output("o"), "has no side outputs"),
        (lambda: ms.map_state(pl.List(pl.Int64), pl.Int64), "Give a plain type"),
        (lambda: ms.value_state("int"), "Give a polars type"),
        (lambda: ms.list_state(pl.Int64, ttl="0 seconds"), "ttl is '0 seconds'"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_declared(call, message):
    with pytest.raises(ConfigError, match=message):
        call()


def test_rows_that_may_be_taken_back_are_refused():
    stream = ms.App("p", log="unused").topic("t", SCHEMA, key="k").stream(time="at")
    counted = stream.window(ms.tumbling("1 minute"), by="k").emit("update").agg(n=ms.count())
    with pytest.raises(ConfigError, match="may be replaced or taken back"):
        counted.process(Emits(), by="k", schema={"k": pl.String})
