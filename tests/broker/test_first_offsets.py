"""Where an app begins to read that reads brokers: the same as with a folder."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from broker.broker_process import InProcess

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")

import millstream as ms
from millstream.client import connect
from millstream.client.start_position import StartPosition
from millstream.errors import OffsetOutOfRangeError


def test_an_app_over_kafka_begins_at_a_time_at_offsets_and_at_the_end(tmp_path: Path) -> None:
    with InProcess(tmp_path / "log") as broker:
        address = f"kafka://{broker.address}"

        def send(first: int, end: int) -> None:
            with connect(address) as log:
                log.create_topic("clicks", partitions=2, exist_ok=True)
                with log.producer() as producer:
                    for n in range(first, end):
                        producer.send(
                            "clicks", {"n": n}, partition=n % 2, timestamp_ms=1000 * n + 1
                        )

        def declare(name: str, start: StartPosition) -> ms.App:
            app = ms.App(name, log=address, state=tmp_path / "state")
            clicks = app.topic("clicks", {"n": int}, partitions=2, start=start)
            clicks.stream().view("seen", key="n")
            return app

        def run(name: str, start: StartPosition) -> set[int]:
            declare(name, start).run(engine="local", until="caught-up")
            with ms.view("seen", log=tmp_path / "state", app=name) as view:
                return set(view.scan()["n"].to_list())

        send(1, 11)
        at = datetime.fromtimestamp(7, UTC)
        assert run("by-time", at) == {7, 8, 9, 10}
        assert run("by-offset", {0: 4}) == {1, 3, 5, 7, 9, 10}
        assert run("by-end", "latest") == set()
        with pytest.raises(
            OffsetOutOfRangeError, match=r"offset 6 of clicks/0, which holds \[0, 5\)"
        ):
            run("beyond", {0: 6})
        send(11, 14)
        assert run("by-end", "earliest") == {11, 12, 13}
        assert run("by-time", "latest") == set(range(7, 14))
