"""Where an app begins to read, on Spark: what was noted counts, whichever engine goes on."""

from __future__ import annotations

import millstream as ms


def declare(folder, **topic):
    app = ms.App("readers", log=folder)
    clicks = app.topic("clicks", {"n": int}, partitions=2, **topic)
    clicks.stream().group_by("n").agg(read=ms.count()).view("seen")
    return app


def send(folder, first, end):
    with ms.connect(folder) as log:
        log.create_topic("clicks", partitions=2, exist_ok=True)
        with log.producer() as producer:
            for n in range(first, end):
                producer.send("clicks", {"n": n}, partition=n % 2)


def test_an_app_begins_at_its_start_on_spark_and_goes_on_without_it(tmp_path):
    send(tmp_path, 0, 20)
    report = declare(tmp_path, start={0: 7, 1: 9}).run(until="caught-up", engine="spark")
    assert report.read == 4
    send(tmp_path, 20, 23)
    assert declare(tmp_path, start="latest").run(until="caught-up", engine="local").read == 3
    with ms.view("seen", log=tmp_path) as view:
        assert set(view.scan().rows()) == {(n, 1) for n in (14, 16, 18, 19, 20, 21, 22)}
