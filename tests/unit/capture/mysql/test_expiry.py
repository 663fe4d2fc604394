"""How much of the binary log is not captured yet, and the alarm before the server purges it."""


def test_what_is_behind_is_measured_and_the_oldest_file_is_alarmed(own_database, replica):
    database = own_database
    database.run("CREATE TABLE t (id INT PRIMARY KEY, v LONGTEXT)", "INSERT INTO t VALUES (1, '')")
    source = database.source()
    replica.follow(source, lambda: True)
    few = source.measure(replica.progress)
    assert few.bytes_behind < 10_000
    assert (few.alarm, few.rows_expected, few.exceeded) == ("", None, False)
    database.run("UPDATE t SET v = repeat('x', 1000000)", "FLUSH BINARY LOGS")
    more = source.measure(replica.progress)
    assert 1_000_000 < more.bytes_behind < 1_100_000
    at = replica.progress["file"]
    oldest = database.run("SHOW BINARY LOGS")[0][0]
    database.run(f"PURGE BINARY LOGS TO '{at}'", "SET GLOBAL binlog_expire_logs_seconds = 0")
    assert source.measure(replica.progress).alarm == ""  # files are kept for ever
    database.run("SET GLOBAL binlog_expire_logs_seconds = 86400")
    alarm = source.measure(replica.progress).alarm
    assert f"reads {at}, the oldest file" in alarm
    assert "purges it 86,400 s after its last event" in alarm
    replica.follow(source, lambda: True)
    assert source.measure(replica.progress).alarm == ""
    behind = {**replica.progress, "file": oldest.rpartition(".")[0] + ".000000"}
    assert "has purged" in source.measure(behind).alarm


def test_about_how_many_rows_are_still_to_be_read_is_known(database, replica):
    database.run("CREATE TABLE t (id INT PRIMARY KEY)")
    database.run("INSERT INTO t VALUES " + ", ".join(f"({n})" for n in range(50)))
    database.run("ANALYZE TABLE t")
    source = database.source()
    replica.follow(source, lambda: True, limit=1)
    assert 30 < source.measure(replica.progress).rows_expected < 70
    replica.follow(source, lambda: True)
    assert source.measure(replica.progress).rows_expected is None
    assert source.remove() == []
