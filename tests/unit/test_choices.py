"""Every parameter that takes one of a few words refuses all others, and names the nearest."""

import inspect
import typing
from datetime import UTC, datetime

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

import millstream as ms
from millstream import testing
from millstream.choices import choose, did_you_mean
from millstream.client.log import EventLog
from millstream.errors import ConfigError
from millstream.pipeline.stream import Stream, Windowed


class Nothing(ms.ProcessFunction):
    def on_row(self, context, row): ...


SCHEMA = {"id": str, "n": int, "at": datetime, "tags": list[str]}
DECIDER = ms.Decider(initial=int, decide=lambda _command, _state: [], evolve=lambda s, _event: s)


def stream(**options):
    topic = ms.App("a", log="unused").topic("t", SCHEMA)
    return topic.stream(time="at", **options)


def percolated(**options):
    app = ms.App("a", log="unused")
    stream = app.topic("t", SCHEMA).stream(time="at")
    return stream.percolate(app.table("q", SCHEMA, key="id", time="at"), "id", **options)


WITHIN = ("0 seconds", "1 minute")


def two(call):
    """Call with two streams of one app."""
    app = ms.App("a", log="unused")
    return call(*(app.topic(name, SCHEMA).stream(time="at") for name in "tu"))


def connected(call):
    def wrong(tmp_path, word):
        with ms.connect(tmp_path) as log:
            log.create_topic("t")
            call(log, word)

    return wrong


def declared(call):
    return lambda _tmp_path, word: call(word)


# (parameter, a word that is nearly right, the right one): what is called with it.
WRONG = {
    ("App", "on_error", "dead_letter", "dead-letter"): declared(
        lambda word: ms.App("a", log="unused", on_error=word)
    ),
    ("App.run", "until", "caught_up", "caught-up"): declared(
        lambda word: ms.App("a", log="unused").run(until=word)
    ),
    ("App.run", "engine", "locl", "local"): declared(
        lambda word: ms.App("a", log="unused").run(engine=word)
    ),
    ("App.start", "engine", "locl", "local"): declared(
        lambda word: ms.App("a", log="unused").start(engine=word)
    ),
    ("App.topic", "format", "JSON", "json"): declared(
        lambda word: ms.App("a", log="unused").topic("t", SCHEMA, format=word)
    ),
    ("App.topic", "metadata", "offsets", "offset"): declared(
        lambda word: ms.App("a", log="unused").topic("t", SCHEMA, metadata=(word,))
    ),
    ("App.topic", "bad", "dead_letter", "dead-letter"): declared(
        lambda word: ms.App("a", log="unused").topic("t", SCHEMA, bad=word)
    ),
    ("Topic.stream", "late", "corect", "correct"): declared(lambda word: stream(late=word)),
    ("Windowed.emit", "mode", "updates", "update"): declared(
        lambda word: stream().window(ms.tumbling("1 minute")).emit(word)
    ),
    ("Stream.percolate", "analyzers", "englisch", "english"): declared(
        lambda word: percolated(analyzers={"id": word})
    ),
    ("Stream.percolate", "on_error", "stopp", "stop"): declared(
        lambda word: percolated(on_error=word)
    ),
    ("Stream.dedup", "null", "droop", "drop"): declared(
        lambda word: stream().dedup("id", within="1 day", null=word)
    ),
    ("Stream.dedup", "late", "sides", "side"): declared(
        lambda word: stream().dedup("id", within="1 day", late=word)
    ),
    ("Stream.map_frames", "rows", "sane", "same"): declared(
        lambda word: stream().map_frames(lambda frame: frame, rows=word)
    ),
    ("Stream.map_frames", "on_error", "stopp", "stop"): declared(
        lambda word: stream().map_frames(lambda frame: frame, on_error=word)
    ),
    ("Stream.filter", "on_error", "stopp", "stop"): declared(
        lambda word: stream().filter(pl.col("n") > 1, on_error=word)
    ),
    ("Stream.select", "on_error", "stopp", "stop"): declared(
        lambda word: stream().select("n", on_error=word)
    ),
    ("Stream.with_columns", "on_error", "stopp", "stop"): declared(
        lambda word: stream().with_columns(m=pl.col("n"), on_error=word)
    ),
    ("Stream.split", "on_error", "stopp", "stop"): declared(
        lambda word: stream().split(pl.col("n") > 1, on_error=word)
    ),
    ("Stream.explode", "on_error", "stopp", "stop"): declared(
        lambda word: stream().explode("tags", on_error=word)
    ),
    ("Stream.process", "order", "arrivals", "arrival"): declared(
        lambda word: stream().process(Nothing(), by="id", schema={"id": str}, order=word)
    ),
    ("Stream.process", "on_error", "stopp", "stop"): declared(
        lambda word: stream().process(Nothing(), by="id", schema={"id": str}, on_error=word)
    ),
    ("Stream.table", "order", "offsets", "offset"): declared(
        lambda word: stream().table("id", order=word)
    ),
    ("Stream.table", "keep", "latests", "latest"): declared(
        lambda word: stream().table("id", keep=word)
    ),
    ("App.table", "order", "Time", "time"): declared(
        lambda word: ms.App("a", log="unused").table("t", SCHEMA, key="id", order=word)
    ),
    ("App.table", "envelope", "debesium", "debezium"): declared(
        lambda word: ms.App("a", log="unused").table("t", SCHEMA, key="id", envelope=word)
    ),
    ("debezium", "decimals", "strings", "string"): declared(
        lambda word: ms.debezium(decimals=word)
    ),
    ("debezium", "time_unit", "uss", "us"): declared(lambda word: ms.debezium(time_unit=word)),
    ("Stream.top", "ties", "denserank", "dense_rank"): declared(
        lambda word: stream().top(3, by="n", per="id", ties=word)
    ),
    ("Stream.top", "by", "descc", "desc"): declared(
        lambda word: stream().top(3, by=[("n", word)], per="id")
    ),
    ("PatternSequence.skip", "mode", "past_lst", "past_last"): declared(
        lambda word: ms.sequence("a", pl.col("n") > 1).skip(word)
    ),
    ("Stream.match_recognize", "rows_per_match", "al", "all"): declared(
        lambda word: stream().match_recognize(
            ms.row_pattern("A"), partition_by="id", rows_per_match=word
        )
    ),
    ("Stream.join", "how", "fulll", "full"): declared(
        lambda word: two(lambda a, b: a.join(b, "id", within=WITHIN, how=word))
    ),
    ("Stream.join", "emit", "eagerly", "eager"): declared(
        lambda word: two(lambda a, b: a.join(b, "id", within=WITHIN, how="left", emit=word))
    ),
    ("Stream.join_asof", "how", "iner", "inner"): declared(
        lambda word: two(lambda a, b: a.join_asof(b, "id", how=word))
    ),
    ("Stream.join_asof", "late", "corect", "correct"): declared(
        lambda word: two(lambda a, b: a.join_asof(b, "id", late=word))
    ),
    ("Stream.join_asof", "direction", "backwards", "backward"): declared(
        lambda word: two(lambda a, b: a.join_asof(b, "id", direction=word))
    ),
    ("Stream.lookup", "how", "Left", "left"): declared(
        lambda word: two(lambda a, b: a.lookup(b.table("id"), "id", how=word))
    ),
    ("Table.join", "how", "anty", "anti"): declared(
        lambda word: two(lambda a, b: a.table("id").join(b.table("id"), "id", how=word))
    ),
    ("http_lookup", "method", "PSOT", "POST"): declared(
        lambda word: ms.http_lookup("http://api/{id}", method=word)
    ),
    ("Stream.enrich", "on_error", "nul", "null"): declared(
        lambda word: stream().enrich(
            lambda keys: keys, on="id", schema={"m": pl.Int64}, on_error=word
        )
    ),
    ("Stream.to", "cleanup", "compacted", "compact"): declared(
        lambda word: stream().to("u", key="id", cleanup=word)
    ),
    ("calendar", "week_start", "Sundays", "sunday"): declared(
        lambda word: ms.calendar("1 week", tz="UTC", week_start=word)
    ),
    ("distinct", "method", "exakt", "exact"): declared(lambda word: ms.distinct("n", method=word)),
    ("quantile", "method", "KLL", "kll"): declared(lambda word: ms.quantile("n", 0.5, method=word)),
    ("quantiles", "method", "kkl", "kll"): declared(
        lambda word: ms.quantiles("n", [0.5], method=word)
    ),
    ("top_k", "method", "frequent items", "frequent_items"): declared(
        lambda word: ms.top_k("n", 3, method=word)
    ),
    ("EventLog.producer", "compression", "zst", "zstd"): connected(
        lambda log, word: log.producer(compression=word)
    ),
    ("EventLog.producer", "durability", "sync", "synced"): connected(
        lambda log, word: log.producer(durability=word)
    ),
    ("EventLog.producer", "overload", "drop-newest", "drop_newest"): connected(
        lambda log, word: log.producer(overload=word)
    ),
    ("EventLog.consumer", "commit", "Auto", "auto"): connected(
        lambda log, word: log.consumer("t", commit=word)
    ),
    ("EventLog.consumer", "start", "earlyest", "earliest"): connected(
        lambda log, word: log.consumer("t", start=word)
    ),
    ("EventLog.consumer", "isolation", "read-committed", "read_committed"): connected(
        lambda log, word: log.consumer("t", isolation=word)
    ),
    ("EventLog.read", "isolation", "read-committed", "read_committed"): connected(
        lambda log, word: log.read("t", 0, isolation=word)
    ),
    ("EventLog.reader", "isolation", "read-committed", "read_committed"): connected(
        lambda log, word: log.reader({}, isolation=word)
    ),
    ("EventLog.create_topic", "cleanup", "compacted", "compact"): connected(
        lambda log, word: log.create_topic("u", cleanup=word)
    ),
    ("EventLog.create_topic", "settings", "retention_ms", "retention.ms"): connected(
        lambda log, word: log.create_topic("u", settings={word: "1"})
    ),
    ("EventStore", "rejections", "records", "record"): connected(
        lambda log, word: ms.EventStore(log, "s", DECIDER, ms.EventTypes(), rejections=word)
    ),
    ("EventStore.handle", "on_conflict", "retries", "retry"): connected(
        lambda log, word: ms.EventStore(log, "s", DECIDER, ms.EventTypes()).handle(
            "a", 1, on_conflict=word
        )
    ),
    ("folder", "format", "parket", "parquet"): declared(lambda word: ms.folder("in", format=word)),
    ("folder", "changed", "skipp", "skip"): declared(lambda word: ms.folder("in", changed=word)),
    ("redis_stream", "lost", "skipp", "skip"): declared(
        lambda word: ms.redis_stream("redis://h", "s", lost=word)
    ),
    ("sink", "start", "earlyest", "earliest"): declared(
        lambda word: ms.sink(ms.to_http("http://h"), topic="t", start=word)
    ),
    ("to_duckdb", "extra", "skipp", "skip"): declared(
        lambda word: ms.to_duckdb("f.duckdb", table="t", extra=word)
    ),
    ("to_email", "of", "rows", "row"): declared(
        lambda word: ms.to_email("smtp://h", to="a@x", sender="b@x", of=word)
    ),
    ("to_email", "encryption", "starttl", "starttls"): declared(
        lambda word: ms.to_email("smtp://h", to="a@x", sender="b@x", encryption=word)
    ),
    ("to_mariadb", "extra", "skipp", "skip"): declared(
        lambda word: ms.to_mariadb("mariadb://u@h/d", table="t", extra=word)
    ),
    ("to_http", "form", "line", "lines"): declared(lambda word: ms.to_http("http://h", form=word)),
    ("to_http", "content", "rows", "row"): declared(
        lambda word: ms.to_http("http://h", content=word)
    ),
    ("Stream.peek", "end", "frist", "first"): declared(lambda word: stream().peek(end=word)),
    ("testing.run", "engine", "kernels", "kernel"): declared(
        lambda word: testing.run(ms.App("a", log="unused"), {}, engine=word)
    ),
}


@pytest.mark.parametrize(
    ("where", "call"), WRONG.items(), ids=[f"{at[0]}({at[1]}=)" for at in WRONG]
)
def test_a_word_that_is_nearly_right_is_refused_with_the_right_one(where, call, tmp_path):
    _, _, word, right = where
    with pytest.raises(ConfigError) as refused:
        call(tmp_path, word)
    message = str(refused.value)
    assert repr(word) in message
    assert f"Did you mean {right!r}?" in message


def _takes_words(annotation):
    if typing.get_origin(annotation) is typing.Literal:
        return all(isinstance(word, str) for word in typing.get_args(annotation))
    return any(_takes_words(part) for part in typing.get_args(annotation))


def _public_callables():
    for name in ms.__all__:  # what users do not construct is checked by what makes it
        if not isinstance(getattr(ms, name), type):
            yield name, getattr(ms, name)
    yield "App", ms.App
    yield "EventStore", ms.EventStore
    for of in (EventLog, ms.EventStore, Stream, Windowed, ms.App):
        for name, method in inspect.getmembers(of, inspect.isfunction):
            if not name.startswith("_"):
                yield f"{of.__name__}.{name}", method
    yield "testing.run", testing.run


def test_the_table_above_has_every_parameter_of_the_public_interface_that_takes_words():
    told = {(name, parameter) for name, parameter, _, _ in WRONG}
    missing = set()
    for name, made in _public_callables():
        if not callable(made):
            continue
        module = inspect.getmodule(made)
        for parameter in inspect.signature(made).parameters.values():
            text = parameter.annotation
            if not isinstance(text, str):
                continue
            try:
                annotation = eval(text, vars(module))  # the project's own annotation
            except NameError:  # imported for the type alone
                continue
            if _takes_words(annotation) and (name, parameter.name) not in told:
                missing.add((name, parameter.name))
    assert missing == set()


def test_words_that_are_no_text_are_refused_whatever_they_compare_to():
    for given_ in (pl.col("x"), None, 3, ["a"], datetime.now(UTC)):
        with pytest.raises(ConfigError, match='Choose "a" or "b"'):
            choose("it", given_, ("a", "b"))


@given(st.lists(st.text(min_size=1), min_size=1, unique=True), st.data())
def test_an_allowed_word_is_returned_and_every_other_refused(words, data):
    assert choose("it", (word := data.draw(st.sampled_from(words))), words) == word
    other = data.draw(st.text().filter(lambda text: text not in words))
    with pytest.raises(ConfigError):
        choose("it", other, words)


def test_the_name_that_was_meant_is_found_whatever_its_case_and_strokes():
    assert did_you_mean("Caught_Up", ("stopped", "caught-up")) == " Did you mean 'caught-up'?"
    assert did_you_mean("clcks", ["clicks", "orders"]) == " Did you mean 'clicks'?"
    assert did_you_mean("payments", ["clicks", "orders"]) == ""
    assert did_you_mean("x", []) == ""
