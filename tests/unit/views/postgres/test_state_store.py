"""A state store in PostgreSQL: broken connections, restarts, rights, addresses; readers that have only a URL."""

import dataclasses
import datetime as dt
import logging
import random
import signal
import subprocess
import threading
import time
from urllib.parse import quote, unquote, urlsplit

import polars as pl
import pytest
from click.testing import CliRunner
from contract.cutting_proxy import CuttingProxy

import millstream as ms
from millstream import testing
from millstream.cli.main import millstream
from millstream.errors import (
    ConfigError,
    EnvironmentProblem,
    FencedError,
    RetriableError,
    UnknownViewError,
)
from millstream.kernels.state.keyhash import Buckets
from millstream.object_store.address import parse_state_url
from millstream.object_store.place import DESCRIPTION, new_place
from millstream.ops.dead_letter_replay import dead_letters
from millstream.ops.doctor import diagnose
from millstream.ops.reset import find_footprint, reset
from millstream.testing.inputs import items_of
from millstream.testing.kernel_engine import KernelEngine
from millstream.testing.postgres import PostgresServer
from millstream.views.schema import Fence, ViewChange, ViewSchema
from millstream.views.store_location import open_state_store, parse_state_store
from millstream.views.store_note import check_same_store, note_store, store_location

psycopg = pytest.importorskip("psycopg", reason="the driver of PostgreSQL is not installed here")

COUNTS = ViewSchema("counts", (("word", "str"), ("n", "int")), ("word",))


def address(url, app="app"):
    return parse_state_store(url, app, what="The app's store")


def begun(store):
    """Begin a run; return how to commit its batches."""
    store.declare(COUNTS)
    run, _ = store.begin_run("app", "main", "checkpoint")

    def commit(batch_id, **rows):
        frame = pl.DataFrame({"word": list(rows), "n": list(rows.values())}, schema=COUNTS.dtypes)
        changes = [ViewChange("counts", frame)]
        fence = Fence("app", "main", run, batch_id)
        return store.commit(fence, changes, position={"t": {"0": batch_id}}, status={})

    return commit


@pytest.fixture
def proxy(database):
    running = CuttingProxy(database)
    yield running
    running.close()


@pytest.mark.parametrize("cut", ["before", "after"])
def test_a_connection_that_breaks_during_commit_commits_the_batch_once(proxy, cut):
    said = []
    with open_state_store(address(proxy.url), on_wait=said.append) as store:
        commit = begun(store)
        assert commit(0, a=1)
        proxy.cut = cut
        assert commit(1, a=2, b=2)
        assert proxy.cut is None
        assert store.changes("counts")["_batch_id"].to_list() == [0, 1, 1]
        assert store.last_batch_id("app") == 1
        assert commit(1, a=3) is False
    (line,) = said
    assert line.startswith("waiting for postgresql://127.0.0.1:")
    assert "\n" not in line


def test_after_a_broken_commit_a_newer_driver_still_fences(proxy, database):
    with (
        open_state_store(address(proxy.url), on_wait=lambda _: None) as old,
        open_state_store(address(database)) as new,
    ):
        commit = begun(old)
        commit(0, a=1)
        proxy.refuses, proxy.cut = True, "before"

        def replace():
            begun(new)
            proxy.refuses = False

        later = threading.Timer(0.3, replace)
        later.start()
        with pytest.raises(FencedError, match="replaced by run 2"):
            commit(1, a=2)
        later.join()


def test_a_server_that_is_away_is_waited_for_and_then_given_up(proxy):
    said = []
    with open_state_store(address(proxy.url + "?wait=1"), on_wait=said.append) as store:
        commit = begun(store)
        proxy.refuses = True
        proxy.reset()
        with pytest.raises(RetriableError, match="could not be used for 1 seconds") as caught:
            commit(0, a=1)
        assert len(said) == 1
        assert "for up to 1 seconds" in said[0]
        assert "tester" not in str(caught.value) + said[0]
        proxy.refuses = False
        assert commit(0, a=1)


def test_a_server_that_is_restarted_is_waited_for():
    with PostgresServer() as server:
        url, process = server.url("a"), server._process

        def restart():
            nonlocal process
            process.send_signal(signal.SIGINT)
            process.wait()
            server._process = process = subprocess.Popen(process.args, **server._as_account())

        with (
            open_state_store(address(url)) as store,
            open_state_store(address(url), readonly=True) as reader,
        ):
            commit = begun(store)
            assert commit(0, a=1)
            restart()
            assert commit(1, a=2)
            with pytest.raises(RetriableError):
                reader.scan("counts")
            assert reader.scan("counts").rows() == [("a", 2)]


def test_a_session_that_holds_the_store_is_waited_for(database):
    with open_state_store(address(database)) as store, psycopg.connect(database) as other:
        commit = begun(store)
        other.execute("SELECT FROM millstream_app._millstream_state FOR UPDATE")
        later = threading.Timer(0.3, other.rollback)
        later.start()
        assert commit(0, a=1)
        later.join()


def test_nothing_is_set_for_a_session_so_it_may_come_from_a_pool(database):
    """One session serves two apps in turns, and one that a pool had given to others."""
    with (
        open_state_store(address(database, "app")) as one,
        open_state_store(address(database, "two")) as two,
    ):
        commit = begun(one)
        two.declare(ViewSchema("counts", (("word", "str"), ("n", "float")), ("word",)))
        run, _ = two.begin_run("two", "main", "checkpoint")
        session = one._writer._session
        two._writer._session.close()
        two._reader._session.close()
        session.execute("SET search_path = pg_temp")
        session.execute("SET TIME ZONE 'Asia/Tokyo'")
        two._writer._session, two._reader._session = session, one._reader._session
        for batch_id in range(3):
            assert commit(batch_id, a=batch_id)
            rows = pl.DataFrame({"word": ["a"], "n": [batch_id + 0.5]})
            fence = Fence("two", "main", run, batch_id)
            assert two.commit(fence, [ViewChange("counts", rows)], position={}, status={})
        assert one.scan("counts").rows() == [("a", 2)]
        assert two.scan("counts").rows() == [("a", 2.5)]
        assert session.execute("SHOW search_path").fetchone() == ("pg_temp",)
        assert session.execute("SHOW lock_timeout").fetchone() == ("0",)


def test_a_store_that_is_replaced_fences_its_run(database):
    with open_state_store(address(database)) as store:
        commit = begun(store)
        commit(0, a=1)
        with open_state_store(address(database)) as other:
            other.drop()
        with pytest.raises(FencedError, match="deleted or replaced"):
            commit(1, a=2)
        with pytest.raises(FencedError, match="deleted or replaced"):
            store.is_next(Fence("app", "main", 1, 1))
        with open_state_store(address(database)) as other:
            begun(other)(0, b=1)
        with pytest.raises(FencedError, match="deleted or replaced"):
            commit(1, a=2)


# -- rights ------------------------------------------------------------------------------------


@pytest.fixture
def role(database, postgres_server):
    """A role without any right; how to run what is advised as the owner of the database; its URL."""
    name = f"role{random.randrange(10**9)}"
    secret = "pass of a role"
    with psycopg.connect(database, autocommit=True) as owner:
        owner.execute(f"CREATE ROLE {name} LOGIN PASSWORD '{secret}'")
        owner.execute(
            "REVOKE TEMPORARY ON DATABASE " + database.rpartition("/")[2] + " FROM PUBLIC"
        )
        place = database.rpartition("@")[2]
        yield name, owner, f"postgresql://{name}:{quote(secret)}@{place}"
        owner.execute(f"DROP OWNED BY {name}")
        owner.execute(f"DROP ROLE {name}")


def test_what_a_role_lacks_is_told_with_the_statement_that_grants_it(role):
    name, owner, url = role
    seen = []
    for _ in range(5):
        try:
            with open_state_store(address(url)) as store:
                assert begun(store)(0, a=1)
            break
        except ConfigError as error:
            assert f"The role {name!r} may not" in str(error)
            assert "pass of a role" not in str(error)
            statement = str(error).rpartition("in that database: ")[2]
            seen.append(statement.split(" ON ")[0].split(" AUTH")[0])
            owner.execute(statement)
    assert seen == ['CREATE SCHEMA "millstream_app"', "GRANT TEMPORARY"]


def test_a_reader_needs_no_more_than_to_read(role, database):
    _, owner, url = role
    with open_state_store(address(database)) as store:
        begun(store)(0, a=1)
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"GRANT (USAGE|SELECT)") as caught:
            open_state_store(address(url), readonly=True)
        owner.execute(str(caught.value).rpartition("in that database: ")[2])
    with open_state_store(address(url), readonly=True) as reader:
        assert reader.scan("counts").rows() == [("a", 1)]
    with pytest.raises(ConfigError, match=r"GRANT USAGE, CREATE ON SCHEMA"):
        open_state_store(address(url))


def test_the_schema_of_another_app_is_refused(database):
    open_state_store(address(database + "?schema=shared", "one")).close()
    with pytest.raises(ConfigError, match=r"holds the state of the app 'one'.*\?schema=NAME"):
        open_state_store(address(database + "?schema=shared", "two"))


# -- addresses ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("mysql://host/db", "Allowed are"),
        ("./folder", "Allowed are"),
        ("postgresql://host/db?schema=public", "not public"),
        ("postgresql://host/db?schema=pg_x", "not public"),
        ("postgresql://host/db?schema=", "schema is ''"),
        ("postgresql://host/db?wait=soon", "whole seconds"),
        ("postgresql://host/db?shema=x", "schema, wait"),
        ("postgresql://user:sec:ret@ho[st/db", "cannot be read"),
        (7, "of type int"),
    ],
)
def test_an_address_that_is_none_is_refused_where_it_is_declared(store, said):
    with pytest.raises(ConfigError, match="store") as caught:
        ms.App("app", log="unused", store=store)
    assert said in str(caught.value)
    assert "sec" not in str(caught.value).replace("seconds", "")


def test_a_view_whose_name_is_too_long_for_postgresql_is_refused_where_it_is_declared():
    app = ms.App("app", log="unused", store="postgresql://host/db")
    stream = app.topic("t", {"k": int, "at": dt.datetime}, key="k").stream(time="at")
    with pytest.raises(ConfigError, match="PostgreSQL takes 63"):
        stream.view("v" * 64, key="k")


def test_the_password_is_in_no_text(database, postgres_server, caplog):
    caplog.set_level(logging.DEBUG)
    secret = postgres_server.password
    app = ms.App("app", log="unused", store=database)
    place = address(database)
    wrong = database.replace(quote(secret, safe=""), quote("wrong: p@ss", safe=""))
    assert wrong != database
    texts = [repr(app), str(app), repr(place), str(place), place.option, place.reset_command]
    with pytest.raises(ConfigError) as caught:
        open_state_store(address(wrong))
    texts += [str(caught.value), repr(caught.value.__cause__), repr(caught.value.__context__)]
    with open_state_store(place) as store, pytest.raises(UnknownViewError) as unknown:
        store.scan("none")
    texts += [str(unknown.value), caplog.text]
    for text in texts:
        assert not any(s in text for s in (secret, quote(secret, safe=""), "wrong", "tester:"))


def test_a_password_that_is_missing_is_told_and_not_waited_for(database):
    parts = urlsplit(database)
    bare = f"postgresql://tester@{parts.hostname}:{parts.port}{parts.path}"
    said = []
    with pytest.raises(ConfigError, match="no password supplied"):
        open_state_store(address(bare), on_wait=said.append)
    assert said == []


def test_long_names_of_apps_have_schemas_of_their_own():
    names = ["a" * 62 + end for end in "bc"]
    schemas = [address("postgresql://h/d", name).schema for name in names]
    assert len(set(schemas)) == 2
    assert all(len(schema) <= 63 for schema in schemas)


def test_several_servers_may_be_named():
    place = address("postgresql://u:p@one:5432,two:5433/db?target_session_attrs=read-write")
    assert str(place) == "postgresql://one:5432,two:5433/db, schema millstream_app"


@pytest.mark.parametrize(
    ("place", "shown"),
    [
        ("u:SeCrEt@[::1]:5432/db", "[::1]:5432/db"),
        ("u:SeCrEt@[::1]/db?schema=mine", "[::1]/db"),
        ("/db?host=/run/a&password=SeCrEt", "/db?host=/run/a"),
        ("/db?host=/run/a&port=5433&schema=mine", "/db?host=/run/a&port=5433"),
        ("u:SeCrEt@h:5432/db?dbname=other&sslmode=require", "h:5432/db?dbname=other"),
        ("u:SeCrEt@%2FRun%2Fa/db", "%2FRun%2Fa/db"),
    ],
)
def test_the_folder_of_the_driver_leads_to_the_same_server(tmp_path, place, shown):
    given = address(f"postgresql://{place}")
    note_store(tmp_path, given)
    noted = store_location(tmp_path)
    assert "SeCrEt" not in (tmp_path / "state-store").read_text()
    assert noted.database.shown == f"postgresql://{shown}"
    assert (noted.database.shown, noted.schema) == (given.database.shown, given.schema)
    check_same_store("app", tmp_path, given)


def test_another_server_that_an_option_names_is_another_store(tmp_path):
    note_store(tmp_path, address("postgresql:///db?host=/run/a"))
    with pytest.raises(
        ConfigError, match=r"is in .*host=/run/a.*, and the app names .*host=/run/b"
    ):
        check_same_store("app", tmp_path, address("postgresql:///db?host=/run/b"))


# -- whole apps --------------------------------------------------------------------------------


@dataclasses.dataclass
class Event:
    at: dt.datetime
    ad: int


def clicks(store=None, log="unused"):
    app = ms.App("ads", log=log, store=store)
    stream = app.topic("events", Event).stream(time="at")
    stream.window(ms.tumbling("1 minute"), by="ad").emit("update", early="10 seconds").agg(
        n=ms.count(), last=ms.max("at")
    ).view("per_minute")
    return app


ROWS = 4  # of the view, from these events


def rows(count=120):
    start = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
    chance = random.Random(3)
    good = [Event(start + dt.timedelta(seconds=i), chance.randrange(4)) for i in range(count)]
    return [*good[:50], b"no json", *good[50:]]


def run_on(location, app, log, crashes=0):
    plan = app.plan(Buckets(2, 5))
    engine = KernelEngine(plan, location, {"events": 2}, random.Random(1), log=log)
    items = {"events": items_of(app.topics["events"], rows(), 2, 1)}
    engine.run(items, 6, crashes)


def test_an_app_gives_the_same_in_both_stores_whatever_crashes(database, tmp_path):
    app = clicks(database)
    run_on(tmp_path / "views.db", app, tmp_path, crashes=5)
    run_on(app.state_store, app, tmp_path, crashes=5)
    with (
        open_state_store(tmp_path / "views.db", readonly=True) as plain,
        open_state_store(app.state_store, readonly=True) as kept,
    ):
        for name in ("per_minute", "dead_letters"):
            # Dead letters have the time of their record, which is that of the test.
            kept_rows, plain_rows = (
                (
                    store.scan(name).drop("time", strict=False),
                    store.changes(name).drop("time", strict=False),
                )
                for store in (kept, plain)
            )
            assert all(one.equals(other) for one, other in zip(kept_rows, plain_rows, strict=True))
        assert kept.ledger("ads") == plain.ledger("ads")
        assert kept.position("ads") == plain.position("ads")
        assert kept.outputs("ads").keys() == plain.outputs("ads").keys()
        assert kept.program("ads", "main") == plain.program("ads", "main")


@pytest.fixture
def kept(database, tmp_path):
    """An app that has run elsewhere: all that is known here is its URL."""
    app = clicks(database)
    run_on(app.state_store, app, tmp_path / "elsewhere")
    return database


def command(*words):
    done = CliRunner().invoke(millstream, words)
    assert done.exit_code == 0, done.output
    return done.output


def test_views_and_commands_need_no_more_than_the_url(kept, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ms.view("per_minute", store=kept) as view:
        assert (view.app, view.scan().height) == ("ads", ROWS)
        assert view.changes().height >= ROWS
    with pytest.raises(UnknownViewError, match="per_minute"):
        ms.view("per_hour", store=kept)
    with pytest.raises(UnknownViewError, match="there is state of: ads"):
        dead_letters("unused", "other", store=kept)
    assert "per_minute" in command("view", "list", "--store", kept)
    assert "window_start" in command("view", "show", "per_minute", "--store", kept)
    assert "dead" in command("ledger", "ads", "--store", kept)
    assert "events/" in command("dead", "list", "ads", "--store", kept)
    assert "per_minute" not in command("why", "late", "ads", "--store", kept)
    assert command("why", "open", "ads", "--store", kept)
    (check,) = [one for one in diagnose(tmp_path, kept) if one.name == "store"]
    assert check.ok
    assert "state of: ads" in check.seen
    assert not (tmp_path / "data").exists()


def test_a_reset_needs_no_more_than_the_url(kept, tmp_path):
    running = open_state_store(address(kept, "ads"))
    run, following = running.begin_run("ads", "main", "in-memory")
    found = find_footprint("ads", tmp_path, tmp_path, [kept])
    assert found.views["per_minute"] == ROWS
    assert str(found.state_store).endswith("schema millstream_ads")
    reset(found)
    with pytest.raises(FencedError):
        running.is_next(Fence("ads", "main", run, following))
    running.close()
    with psycopg.connect(kept) as session:
        left = session.execute("SELECT 1 FROM pg_namespace WHERE nspname = 'millstream_ads'")
        assert left.fetchone() is None
    with pytest.raises(ConfigError):
        find_footprint("ads", tmp_path, tmp_path, [kept])


def test_a_reset_that_was_interrupted_lets_no_run_begin(kept):
    with open_state_store(address(kept, "ads")) as store:
        store.mark_reset()
        with pytest.raises(ConfigError, match=r"reset .* was begun.*`millstream reset ads --store"):
            store.begin_run("ads", "main", "in-memory")


@pytest.mark.parametrize("here", [True, False], ids=["with the folder", "by the address alone"])
def test_a_reset_by_address_removes_the_objects_of_the_state(kept, tmp_path, here, monkeypatch):
    parts = urlsplit(kept)
    monkeypatch.setenv("PGUSER", unquote(parts.username))
    monkeypatch.setenv("PGPASSWORD", unquote(parts.password))
    (tmp_path / "state").mkdir()
    place = new_place("ads", parse_state_url(f"file://{tmp_path}/state"))
    with open_state_store(address(kept, "ads")) as store:
        store.put_first_description("ads", DESCRIPTION, place.to_message())
    place.open("runs").put("1-a", lambda file: file.write(b"x"))
    if here:
        (tmp_path / "apps" / "ads").mkdir(parents=True)
        note_store(tmp_path / "apps" / "ads", address(kept, "ads"))
    found = find_footprint("ads", tmp_path, tmp_path, [] if here else [kept])
    assert (found.objects.place, found.objects.count) == (place, 1)
    reset(found)
    assert list(place.open().names()) == []


def test_an_app_of_that_name_with_state_in_the_folder_is_not_reset_with_that_of_a_database(
    kept, tmp_path
):
    file = tmp_path / "apps" / "ads" / "views.db"
    file.parent.mkdir(parents=True)
    run_on(file, clicks(), tmp_path)
    with pytest.raises(ConfigError, match="these are two"):
        find_footprint("ads", tmp_path, tmp_path, [kept])
    assert find_footprint("ads", tmp_path / "none", tmp_path, [kept]).state_store is not None


def test_what_else_is_in_the_schema_stays_after_a_reset(kept, tmp_path):
    with psycopg.connect(kept, autocommit=True) as session:
        session.execute("CREATE TABLE millstream_ads.mine (n int)")
        reset(find_footprint("ads", tmp_path, tmp_path, [kept]))
        names = session.execute(
            "SELECT tablename FROM pg_tables WHERE schemaname = 'millstream_ads'"
        )
        assert names.fetchall() == [("mine",)]


def test_the_folder_of_the_driver_names_the_store_without_credentials(kept, tmp_path):
    folder = tmp_path / "apps" / "ads"
    folder.mkdir(parents=True)
    place = address(kept, "ads")
    check_same_store("ads", folder, place)
    note_store(folder, place)
    noted = store_location(folder)
    assert str(noted) == str(place)
    assert "tester" not in (folder / "state-store").read_text()
    check_same_store("ads", folder, place)
    with pytest.raises(ConfigError, match="names no store"):
        check_same_store("ads", folder, folder / "views.db")
    with pytest.raises(ConfigError, match=r"the app names .*schema other"):
        check_same_store("ads", folder, address(kept + "?schema=other", "ads"))
    found = find_footprint("ads", tmp_path, tmp_path, [kept])
    reset(found)
    assert not folder.exists()


def test_state_in_a_file_is_not_left_behind_for_a_database(tmp_path):
    app = clicks()
    folder = tmp_path / "apps" / "ads"
    run_on(folder / "views.db", app, tmp_path)
    with pytest.raises(ConfigError, match=r"is in .*views.db, with batches up to"):
        check_same_store("ads", folder, address("postgresql://host/db", "ads"))


def test_the_page_shows_apps_of_a_database(kept, tmp_path):
    from millstream.views.server.catalog import ViewCatalog

    catalog = ViewCatalog(tmp_path, [kept])
    try:
        assert catalog.apps() == ["ads"]
        assert {view.schema.name for view in catalog.views()} == {"per_minute", "dead_letters"}
        found = catalog.find("per_minute")
        assert catalog.store(found.store_name).count("per_minute") == ROWS
    finally:
        catalog.close()


def test_the_kit_runs_an_app_without_its_database():
    out = testing.run(clicks("postgresql://nowhere/db"), {"events": rows()}, batches=3)
    assert out["per_minute"].height >= 4


def test_without_the_driver_a_store_is_refused_where_it_is_declared(monkeypatch):
    import builtins

    real = builtins.__import__

    def without(name, *given):
        if name == "psycopg":
            raise ImportError(name)
        return real(name, *given)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(EnvironmentProblem, match=r"millstream\[postgres\]"):
        ms.App("app", log="unused", store="postgresql://host/db")


def test_an_older_server_is_refused(database, monkeypatch):
    monkeypatch.setattr("millstream.views.postgres.connection.SERVER_VERSION_MIN", 990000)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"PostgreSQL 15; views need 99 or newer"):
        open_state_store(address(database))
    assert time.monotonic() - began < 60
