"""A copy in PostgreSQL, whose applier is killed again and again, and so is its server."""

import psycopg
import pytest
from capture_postgres_servers import Shop, start
from killed_applier import Writer, finish, killed_applier, schema

from millstream.testing.postgres import PostgresServer


@pytest.fixture
def shop():
    with start() as server:
        yield Shop(server)


@pytest.fixture
def copy_server():
    with PostgresServer() as server:
        yield server


def look(url):
    try:
        with psycopg.connect(url) as session:
            session.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            if session.execute("SELECT to_regclass('public.b')").fetchone() == (None,):
                return None
            return [session.execute(f"SELECT * FROM {one} ORDER BY id").fetchall() for one in "ab"]
    except psycopg.OperationalError:
        return None  # the server is down


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills", [2, pytest.param(12, marks=pytest.mark.long)])
def test_a_copy_in_postgres_is_whole_at_every_moment(tmp_path, shop, copy_server, kills):
    shop.run(*schema(), "ALTER TABLE a ALTER COLUMN note SET STORAGE EXTERNAL")
    target, folder = copy_server.url("copy"), tmp_path / "log"

    def restart():
        copy_server.kill()
        copy_server.start()

    with shop.connect() as session:
        with Writer(session.execute, kills) as writer:
            killed_applier(
                shop.url,
                target,
                folder,
                lambda: look(target),
                kills=kills,
                seed=kills,
                disturb=restart,
            )
        assert writer.count > 10
    finish(shop.url, target, folder)
    assert look(target) == look(shop.url)
