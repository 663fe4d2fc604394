"""The commands of the log, given `kafka://` for a folder."""

from __future__ import annotations

import io
import json
import sys

import pytest
from broker.broker_process import InProcess

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")

from millstream.cli.main import run


@pytest.fixture
def call(tmp_path, capsysbinary, monkeypatch):
    """Return a function that runs one command line against a broker: its code, and what it says."""
    with InProcess(tmp_path / "log") as broker:
        monkeypatch.setenv("MILLSTREAM_LOG", f"kafka://{broker.address}")

        def run_one(*arguments, stdin=b""):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
            code = run(arguments)
            out, err = capsysbinary.readouterr()
            return code, out.decode() + err.decode()

        yield run_one


def test_topics_records_and_groups_are_those_of_the_broker(call):
    assert call("topic", "create", "clicks", "--partitions", "2", "--retention", "7 days")[0] == 0
    lines = b"".join(b'{"ad": "%d"}\n' % n for n in range(5))
    assert call("produce", "clicks", "--key-field", "ad", stdin=lines)[0] == 0
    (row,) = json.loads(call("topic", "list", "--json")[1])
    assert (row["topic"], row["partitions"], row["records_at_most"]) == ("clicks", 2, 5)
    assert row["bytes"] is None  # brokers do not report it
    assert row["retention_ms"] == 7 * 86_400_000
    _, said = call("consume", "clicks", "--group", "billing", "--json")
    assert sorted(json.loads(line)["key"] for line in said.splitlines()) == list("01234")
    assert call("consume", "clicks", "--group", "billing") == (0, "")
    assert "billing" in call("group", "list")[1]
    assert call("lag", "--check")[0] == 0
    assert (
        call("group", "reset", "billing", "--topic", "clicks", "--to", "earliest", "--yes")[0] == 0
    )
    assert len(call("consume", "clicks", "--group", "billing")[1].splitlines()) == 5
    code, said = call("topic", "alter", "clicks", "--retention", "14 days")
    assert (code, "2 weeks" in said) == (0, True)
    code, said = call("topic", "describe", "clicks")
    assert (code, "2 weeks" in said) == (0, True)
    assert call("topic", "describe", "clicks", "--all")[0] == 0
    assert call("topic", "delete", "clicks", "--yes")[0] == 0
    assert "no topics in kafka://" in call("topic", "list")[1]


def test_what_only_a_folder_holds_is_asked_of_a_folder(call):
    code, said = call("stop", "ads")
    assert code != 0
    assert "brokers keep no state and views" in said
    assert "--log ./data" in said
