"""The WAL that a server keeps for a capture: measured, bounded, given up, and what is installed taken out again."""

import threading

import pytest
from capture_postgres_servers import Shop, start

import millstream as ms
from millstream.cli.main import run as run_command
from millstream.errors import ConfigError, ConflictError, RetriableError

MIB = 1 << 20


def write_wal(shop, mebibytes):
    """Make WAL that no table has to do with. It is on disk then, as a transaction that has a number waits for that."""
    for _ in range(mebibytes):
        message = f"pg_logical_emit_message(false, 'other', repeat('x', {MIB}))"
        shop.run(f"SELECT txid_current(), {message}")


def capture_of(shop, folder, **options):
    made = ms.capture(shop.url, to=folder, name=shop.name, **options)
    made.lag_every_s = 0.02
    made.source.heartbeat_s = 0.05
    return made


def slots(shop):
    return shop.run(
        f"SELECT count(*) FROM pg_replication_slots WHERE database = '{shop.name}' AND NOT temporary"
    )[0][0]


@pytest.fixture
def table(shop):
    shop.run(
        "CREATE TABLE t (id int PRIMARY KEY, n int)",
        "INSERT INTO t SELECT n, 0 FROM generate_series(1, 20) n",
        "ANALYZE t",
    )
    return shop


def test_what_is_kept_and_behind_is_measured_and_alarmed_above_a_quarter(table, replica):
    source = table.source()
    source.wal_bytes_max = 16 * MIB
    replica.follow(source)
    few = source.measure(replica.progress)
    assert few.bytes_behind < MIB
    assert not few.exceeded
    write_wal(table, 6)
    more = source.measure(replica.progress)
    assert 6 * MIB < more.bytes_behind < 8 * MIB
    assert more.bytes_kept >= more.bytes_behind
    assert "of 16.0 MiB that --wal-max allows" in more.alarm
    assert not more.exceeded
    write_wal(table, 12)
    assert source.measure(replica.progress).exceeded
    source.wal_bytes_max = None
    without = source.measure(replica.progress)
    assert (without.alarm, without.exceeded) == ("", False)


def test_the_servers_own_limit_counts_where_it_is_less_and_takes_the_slot_away():
    with start(max_slot_wal_keep_size="32MB", wal_keep_size="0", min_wal_size="32MB") as server:
        shop, replica = Shop(server), _Progress()
        shop.run("CREATE TABLE t (id int PRIMARY KEY)")
        source = shop.source()
        source.wal_bytes_max = 1 << 40
        replica.follow(source)
        write_wal(shop, 12)
        assert "that max_slot_wal_keep_size allows" in source.measure(replica.progress).alarm
        write_wal(shop, 70)
        shop.run("CHECKPOINT")
        with pytest.raises(ConflictError, match="kept more WAL than max_slot_wal_keep_size allows"):
            replica.follow(shop.source())


class _Progress:
    progress = None

    def follow(self, source):
        units = source.units(self.progress)
        for unit in units:
            list(unit.contents)
            self.progress = unit.progress
            source.acknowledge(self.progress)
            if unit.kind == "progress":
                break
        units.close()
        source.close()


def test_beyond_what_is_allowed_the_slot_is_released_and_the_capture_ends(table, tmp_path):
    capture = capture_of(table, tmp_path, wal_bytes_max=1, wal_policy="release")
    with pytest.raises(ConflictError, match="was given up, and changes are missing"):
        capture.run()
    assert slots(table) == 0
    with pytest.raises(ConflictError, match="is gone, and with it the changes"):
        capture_of(table, tmp_path).run()


def test_beyond_what_is_allowed_it_is_only_alarmed_where_the_data_comes_first(table, tmp_path):
    capture = capture_of(table, tmp_path, wal_bytes_max=1, wal_policy="keep")
    alarmed = threading.Event()
    alarms, statuses = [], []

    def alarm(text):
        alarms.append(text)
        alarmed.set()

    running = threading.Thread(
        target=capture.run, kwargs={"on_alarm": alarm, "on_status": statuses.append}
    )
    running.start()
    assert alarmed.wait(60)
    while not (statuses and statuses[-1].alarm):
        table.run("UPDATE t SET n = n + 1")
    capture.stop()
    running.join()
    assert len(alarms) == 1
    assert statuses[-1].bytes_kept > 0
    assert slots(table) == 1


def test_a_snapshot_pauses_for_the_changes_of_meanwhile_and_reads_all_rows(table, replica):
    source = table.source(chunk_rows=4)
    source.pauses = True
    units = source.units(None)
    for number, unit in enumerate(units):
        replica.store(unit)
        source.acknowledge(replica.progress)
        if number < 12:
            table.run(f"UPDATE t SET n = {number + 1} WHERE id = 1")
        if unit.kind == "progress":
            break
    units.close()
    source.close()
    # What was written last may not have been in the WAL's stream yet.
    replica.follow(table.source(), done=lambda: replica.tables["t"][(1,)]["n"] == 12)
    kinds = [kind for kind, _, contents in replica.units if contents]
    first, last = kinds.index("snapshot"), len(kinds) - kinds[::-1].index("snapshot")
    assert "transaction" in kinds[first:last]
    assert sum(change.op == "r" for change in replica.changes("t")) == 20
    assert replica.tables["t"] == table.rows("t", ("id",))


def test_about_how_many_rows_are_still_to_be_read_is_known(table, replica):
    source = table.source(chunk_rows=4)
    replica.follow(source, limit=2)
    assert source.measure(replica.progress).rows_expected == 20
    replica.follow(source)
    assert source.measure(replica.progress).rows_expected is None


def test_what_a_capture_has_installed_is_taken_out_by_one_command(
    table, tmp_path, capsys, monkeypatch
):
    capture_of(table, tmp_path).run(until="caught-up")
    other = capture_of(table, tmp_path / "other")
    other.name = other.source.name = f"millstream_{table.name}_other"
    other.run(until="caught-up")
    assert slots(table) == 2
    monkeypatch.setenv("MILLSTREAM_CAPTURE_PASSWORD", table.server.password)
    url = f"postgresql://{table.server.user}@127.0.0.1:{table.server.port}/{table.name}"
    assert run_command(["capture", url, "--name", table.name, "--remove"]) == 0
    said = capsys.readouterr().out
    assert f"Removed the publication millstream_{table.name}.\n" in said
    assert said.count("Removed the replication slot") == 1
    assert slots(table) == 1
    assert table.run("SELECT pubname FROM pg_publication") == [(f"millstream_{table.name}_other",)]
    with pytest.raises(ConflictError, match="is gone"):
        capture_of(table, tmp_path).run(until="caught-up")
    other.source.remove()
    assert other.source.remove() == []


def test_what_a_running_capture_uses_is_not_taken_from_it(table, tmp_path, monkeypatch):
    capture, idle = capture_of(table, tmp_path), threading.Event()
    running = threading.Thread(
        target=capture.run, kwargs={"on_status": lambda one: one.state == "idle" and idle.set()}
    )
    running.start()
    assert idle.wait(60)
    monkeypatch.setattr("millstream.capture.postgres.source._REMOVE_S", 0.1)
    with pytest.raises(RetriableError, match="Stop the capture that uses it"):
        table.source().remove()
    capture.stop()
    running.join()
    assert slots(table) == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"wal_bytes_max": 0}, "wal_bytes_max is 0"),
        ({"wal_policy": "release"}, "wal_bytes_max is not given"),
    ],
)
def test_limits_that_are_none_are_refused(options, said):
    with pytest.raises(ConfigError, match=said):
        ms.capture("postgresql://a@b/c", **options)
    with pytest.raises(ConfigError, match="only PostgreSQL keeps its log"):
        ms.capture("sqlite:///x.db", wal_bytes_max=5)
