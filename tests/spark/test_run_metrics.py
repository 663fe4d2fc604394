"""A run serves its figures while it works, and tells its alerts."""

from __future__ import annotations

import json
import re
import socket
import sys
import urllib.error
import urllib.request

import pytest
from metrics_text import figures

import millstream as ms
from millstream.views.store_location import open_state_store

NOTE = "import sys; open(sys.argv[1], 'ab').write(sys.stdin.buffer.read())"


def ask(port, path):
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


@pytest.mark.usefixtures("spark")
def test_a_run_shows_its_figures_and_tells_of_dead_letters(tmp_path):
    app = ms.App("shop", log=tmp_path / "data")
    orders = app.topic("orders", {"id": str, "item": str}, partitions=2).stream()
    orders.group_by("item").agg(n=ms.count()).view("by_item", key="item")
    told = tmp_path / "told"
    app.alerts(
        ms.alert(
            "dead",
            "step_exit_rows_total",
            where={"exit": "dead"},
            above=0,
            over="10 minutes",
            tell=ms.tell_command(sys.executable, "-c", NOTE, str(told)),
        ),
        ms.alert(
            "read",
            "app_batches_total",
            above=-1,
            over="10 minutes",
            tell=ms.tell_command(sys.executable, "-c", NOTE, str(told)),
        ),
    )
    with ms.connect(tmp_path / "data") as log:
        log.create_topic("orders", partitions=2)
        with log.producer() as producer:
            for number in range(20):
                producer.send("orders", {"id": f"o{number}", "item": f"i{number % 3}"})
            producer.send("orders", b"no JSON")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    scraped = []

    def scrape(_progress):
        scraped.append((figures(ask(port, "/metrics")[1]), ask(port, "/readyz")))

    app.run(until="caught-up", metrics=f"127.0.0.1:{port}", on_progress=scrape)
    found, ready = scraped[-1]
    assert ready == (200, "ready\n")
    assert found["millstream_app_running", "app=shop"] == 1
    assert found["millstream_app_batches_total", "app=shop"] == len(scraped)
    assert found["millstream_step_exit_rows_total", "app=shop", "exit=dead", "step=orders"] == 1
    state = {key: value for key, value in found.items() if key[0] == "millstream_step_state_rows"}
    assert sum(state.values()) >= 3
    phases = {key[2] for key in found if key[0] == "millstream_app_batch_phase_seconds_total"}
    assert {"phase=plan", "phase=read", "phase=stages", "phase=collect"} <= phases
    with pytest.raises(urllib.error.URLError):
        ask(port, "/metrics")
    with open_state_store(app.state_store, readonly=True) as store:
        assert store.batches("shop")[-1]["rows_max"] == 1_000_000  # what `why behind` compares with
    ids = [json.loads(line)["id"] for line in told.read_text().splitlines()]
    assert [re.sub(r"/\d+/1/", "/at/1/", one) for one in ids] == [
        "shop/read/at/1/firing",
        "shop/dead/at/1/firing",
    ]
