"""Redis and a full-text index have the source after some transaction, whatever is interrupted."""

import itertools
import random

import pytest
import redis_server
from applied_model import KEY, TABLES, ModelDatabase, write

import millstream as ms
from millstream.capture.apply.run import ApplySession
from millstream.capture.apply.targets import target_of
from millstream.client import connect
from millstream.errors import ConfigError, FencedError, RetriableError

STEPS = ("begin", "define", "truncate", "write", "commit")


class Crash(Exception):
    """The process ended here."""


class CrashingTarget:
    """A target that crashes before or after its nth call; ``kill`` is what a crash does to the server, too."""

    def __init__(self, target, at, kill):
        self._target, self._at, self._kill, self._calls = target, at, kill, itertools.count()

    def __getattr__(self, name):
        found = getattr(self._target, name)
        if name not in STEPS:
            return found

        def call(*arguments):
            number = next(self._calls)
            if number == self._at:
                self._kill()
                raise Crash(name)
            found(*arguments)
            if number + 0.5 == self._at:
                self._kill()
                raise Crash(name)

        return call


@pytest.fixture(params=["redis", "tantivy"])
def place(request, tmp_path):
    """Return a target's URL, and what kills its server."""
    if request.param == "tantivy":
        pytest.importorskip("tantivy")
        yield f"tantivy:///{tmp_path}/index", lambda: None
        return
    folder = tmp_path / "redis"
    folder.mkdir()
    with redis_server.start(folder) as server:

        def restart():
            server.kill()
            server.start()

        yield server.url, restart


def without_nulls(rows):
    return {key: {n: v for n, v in row.items() if v is not None} for key, row in rows.items()}


def check(run, database):
    """Return how many transactions a target has; it has the rows that the source had after them."""
    with ApplySession(run) as session:
        for table in session._tables.values():
            found = list(session.target.scan(table))
            rows = {tuple(row[name] for name in KEY): row for row in found}
            assert len(rows) == len(found)
            expected = database.states[session.state.transactions][table.table]
            assert without_nulls(rows) == without_nulls(expected)
        return session.state.transactions


@pytest.mark.parametrize("seed", range(2))
def test_a_copy_is_the_source_after_some_transaction_at_every_step(tmp_path, place, seed):
    (url, kill), database, dice = place, ModelDatabase(seed), random.Random(seed)
    run, applied = ms.apply("shop", url, log=tmp_path / "log"), 0
    opened = run.target
    with connect(tmp_path / "log") as log:
        for _ in range(4):
            write(log, [database.unit() for _ in range(8)], partitions=4)
            while applied < database.number:
                at = dice.randrange(10) + dice.choice([0, 0.5])
                run.target = lambda at=at: CrashingTarget(opened(), at, kill)
                run.batch_changes = dice.choice([1, 5, 20, 1000])
                try:
                    with ApplySession(run) as session:
                        while session.step().state != "idle":
                            pass
                except Crash:
                    pass
                run.target = opened
                applied = check(run, database)
    assert applied == database.number
    assert set(TABLES) == {"users", "orders"}


def test_rows_of_others_are_not_touched_and_the_earlier_applier_stops(tmp_path, place):
    url, _ = place
    database = ModelDatabase(1)
    with connect(tmp_path / "log") as log:
        write(log, [database.unit()])
        first, second = (ms.apply("shop", url, log=tmp_path / "log") for _ in range(2))
        with ApplySession(first) as older:
            older.step()
            write(log, [database.unit()])
            if url.startswith("tantivy"):
                with pytest.raises(RetriableError, match="another program writes"):
                    second.target()
            else:
                second.run(until="caught-up")
                write(log, [database.unit()])
                with pytest.raises(FencedError, match="run one at a time"):
                    older.step()
    second.run(until="caught-up")
    assert check(second, database) == database.number


def test_the_documents_of_an_index_are_found_by_their_words(tmp_path):
    tantivy = pytest.importorskip("tantivy")
    from millstream.capture.apply.tantivy import index_schema

    database = ModelDatabase(3, unavailable=False)
    with connect(tmp_path / "log") as log:
        write(log, [database.unit() for _ in range(20)])
    ms.apply("shop", f"tantivy:///{tmp_path}/index", log=tmp_path / "log").run(until="caught-up")
    row = next(iter(database.tables["users"].values()))
    index = tantivy.Index(index_schema(), path=str(tmp_path / "index"))
    searcher = index.searcher()
    hits = searcher.search(index.parse_query(row["big"], ["text"]), 10).hits
    import json

    found = [json.loads(searcher.doc(address)["row"][0]) for _, address in hits]
    assert row in found
    assert all(one["big"] == row["big"] for one in found)


@pytest.mark.parametrize("url", ["redis://:secret@", "redis://host/x", "redis://host:port/1"])
def test_an_address_of_redis_that_cannot_be_is_refused_without_its_password(url):
    with pytest.raises(ConfigError, match="is not one that can be read") as refused:
        ms.apply("shop", url)
    assert "secret" not in str(refused.value)


def test_a_wrong_password_of_redis_is_refused_and_not_tried_without_end(tmp_path, monkeypatch):
    folder = tmp_path / "redis"
    folder.mkdir()
    with redis_server.start(folder) as server:
        redis = pytest.importorskip("redis")
        with redis.Redis(port=server.port) as client:
            client.config_set("requirepass", "right")
        for given in ("wrong", ""):
            monkeypatch.setenv("MILLSTREAM_APPLY_PASSWORD", given)
            with pytest.raises(ConfigError, match=r"refuses .*MILLSTREAM_APPLY_PASSWORD"):
                target_of(server.url)()
        monkeypatch.setenv("MILLSTREAM_APPLY_PASSWORD", "right")
        target_of(server.url)().close()
        monkeypatch.setenv("MILLSTREAM_APPLY_PASSWORD", "wrong")
        target_of(server.url.replace("redis://", "redis://:right@"))().close()
