"""One answer in any batches, partitions and crashes: that it is found, and that it is missed."""

import os
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import polars as pl
import pytest

import millstream as ms
from millstream import testing
from millstream.errors import ConfigError
from millstream.testing.kernel_engine import KernelEngine

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class Click:
    id: str
    user: str
    at: datetime


def clicks(count):
    made = [
        Click(f"c{n // 2}", f"u{n % 5}", START + timedelta(seconds=3 * (n // 2)))
        for n in range(count)
    ]
    return [click for click in made for _ in range(2)]


def pipeline():
    app = ms.App("clicks", log="unused")
    stream = app.topic("clicks", Click, key="user").stream(
        time="at", watermark=ms.watermark("1 minute", idle=None)
    )
    once = stream.dedup(["id", "user"], within="10 minutes")
    once.window(ms.tumbling("1 minute"), by="user").emit("retract").agg(n=ms.count()).view(
        "minutes"
    )
    once.window(ms.session("10 seconds"), by="user").emit("update").agg(n=ms.count()).view("visits")
    once.view("seen", key=["id", "user"])
    return app


def test_a_sound_pipeline_has_one_answer():
    out = testing.replay(pipeline(), {"clicks": clicks(120)}, batchings=6, crash=3)
    assert out["minutes"]["n"].sum() == 120
    assert out["seen"].height == 120


def test_a_pipeline_that_looks_at_its_batches_is_found_out():
    app = ms.App("sizes", log="unused")
    stream = app.topic("clicks", Click, key="user").stream(time="at")
    sized = stream.map_frames(lambda frame: frame.with_columns(size=pl.lit(frame.height)))
    sized.view("sizes", key="id")
    with pytest.raises(AssertionError, match=r"view 'sizes' is another one after testing\.run"):
        testing.replay(app, {"clicks": clicks(60)})


@pytest.mark.parametrize("crash", [1, 4, 20])
def test_crashes_change_nothing_that_comes_out(crash):
    rows = {"clicks": clicks(80)}
    wanted = testing.run(pipeline(), rows, batches=5, seed=3)
    for seed in range(2):
        out = testing.run(pipeline(), rows, batches=5, seed=seed, crash=crash)
        for view in wanted.views:
            assert out[view].equals(wanted[view]), view
        assert out.ledger.filter(step="clicks")["read"].sum() == 160


def test_a_state_that_outlives_a_crash_would_be_found_out(monkeypatch):
    monkeypatch.setattr(testing.kernel_engine.MemoryBucketState, "copy", lambda self: self)
    with pytest.raises(AssertionError):
        testing.replay(pipeline(), {"clicks": clicks(120)}, batchings=20, crash=4)


def test_spark_takes_no_crash():
    with pytest.raises(ConfigError, match="takes no crash"):
        testing.run(pipeline(), {"clicks": []}, engine="spark", crash=1)


def test_every_crash_happens(monkeypatch):
    lost = []
    real = KernelEngine._crash

    def noted(self, targets, batch_id, ends, point):
        lost.append(point)
        real(self, targets, batch_id, ends, point)

    monkeypatch.setattr(KernelEngine, "_crash", noted)
    testing.run(pipeline(), {"clicks": clicks(20)}, batches=4, crash=9)
    assert len(lost) == 9
    assert set(lost) == {"before the commit", "between the commits", "after the commit"}


USERS_TEST = """
import millstream as ms
from dataclasses import dataclass

@dataclass
class Event:
    user: str

def test_counts(replay):
    app = ms.App("a", log="unused")
    app.topic("events", Event, key="user").stream().view("seen", key="user")
    out = replay(app, {"events": [{"user": "u1"}, {"user": "u2"}]})
    assert out["seen"].height == 2
"""


def test_users_tests_have_it_as_a_fixture(tmp_path):
    (tmp_path / "test_users.py").write_text(USERS_TEST)
    source = Path(testing.__file__).parents[2]
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "millstream.testing.plugin"),
            *("--millstream-batchings", "3", "--millstream-seed", "7", str(tmp_path)),
        ],
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(source)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed" in ended.stdout, ended.stdout + ended.stderr


def test_columns_whose_names_look_like_patterns_are_compared():
    app = ms.App("patterns", log="unused")
    rows = app.topic("rows", {"id": int, "^a.*$": int, "abc": int}, key="id").stream()
    rows.view("rows", key="id")
    out = testing.replay(app, {"rows": [{"id": n, "^a.*$": n, "abc": -n} for n in range(5)]})
    assert out["rows"]["^a.*$"].to_list() == [0, 1, 2, 3, 4]
    sized = rows.map_frames(
        lambda frame: frame.with_columns(pl.lit(frame.height, pl.Int64).alias("abc"))
    )
    sized.view("sizes", key="id")
    with pytest.raises(AssertionError, match="view 'sizes' is another one"):
        testing.replay(app, {"rows": [{"id": n, "^a.*$": n, "abc": 0} for n in range(5)]})
