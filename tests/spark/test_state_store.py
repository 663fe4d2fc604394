"""An app on Spark whose state store is in PostgreSQL: run, killed, restarted, read by its URL, reset."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psycopg
import pytest
from test_job import rows, send, two_stages

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.ops.reset import find_footprint, reset
from millstream.views.store_location import open_state_store

DRIVER = """
import sys
from test_job import two_stages
two_stages(sys.argv[1], store=sys.argv[2]).run(until="caught-up", rows_per_batch=40)
"""


def expected(events):
    out = testing.run(two_stages("unused"), {"events": events})
    return {name: out[name].sort(out[name].columns) for name in out.views}


def read(url, name):
    with ms.view(name, store=url) as opened:
        found = opened.scan()
    return found.sort(found.columns)


def hold_up_commits(url, seconds):
    """End every session and keep the store locked for a while, as a failover does."""
    with psycopg.connect(url) as other:
        other.execute("SELECT FROM millstream_two._millstream_state FOR UPDATE")
        other.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE pid <> pg_backend_pid() AND datname = current_database()"
        )
        time.sleep(seconds)


def test_an_app_with_its_state_in_a_database_is_run_killed_and_reset(tmp_path, database):
    log, events = tmp_path / "log", rows(200)
    send(log, events[:150])
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    driver = subprocess.Popen([sys.executable, "-c", DRIVER, log, database], env=environment)
    while driver.poll() is None:
        try:
            if read(database, "by_ad").height:
                break
        except ConfigError:
            pass
        time.sleep(0.05)
    driver.send_signal(signal.SIGKILL)
    driver.wait()

    app = two_stages(log, store=database)
    assert not (app.folder / "views.db").exists()
    send(log, events[150:])
    troubled = []

    def trouble(progress):
        if not troubled:
            troubled.append(threading.Thread(target=hold_up_commits, args=(database, 1.0)))
            troubled[0].start()

    report = app.run(until="caught-up", rows_per_batch=40, on_progress=trouble)
    troubled[0].join()
    assert report.ok
    wanted = expected(events)
    assert not (app.folder / "views.db").exists()
    for name, frame in wanted.items():
        assert read(database, name).equals(frame)
    with open_state_store(app.state_store, readonly=True) as store:
        assert store.status("two")["read"] is not None
        last = store.last_batch_id("two")
        assert {line["batch_id"] for line in store.ledger("two")} == set(range(last + 1))

    with pytest.raises(ConfigError, match="names no store"):
        two_stages(log).run(until="caught-up")
    reset(find_footprint("two", log, log, [database]))
    assert not app.folder.exists()
    app.run(until="caught-up")
    for name, frame in wanted.items():
        assert read(database, name).equals(frame)
