"""`millstream why` and `millstream top`: what they print, for people and for programs."""

import json
import shutil

import pytest
from edited_app import EditedApp
from followed_clicks import SOURCE, clicks

from millstream.cli.top import _WatchedApp
from millstream.views.commit.batch_history import PhaseTimer, batch_record
from millstream.views.commit.committer import BatchCommitter
from millstream.views.runs.progress import Progress
from millstream.views.server.status import AppStatus
from millstream.views.store_location import STATE_STORE_FILE, open_state_store


@pytest.fixture(scope="module")
def edited(tmp_path_factory):
    """An app that has read 20 clicks, in batches whose records a job would write; 4 are unread."""
    app = EditedApp(tmp_path_factory.mktemp("ads"), 2, 8, SOURCE, by_ad=True)
    app.create()
    app.append(clicks(20, 3))
    commit = BatchCommitter.commit

    def with_record(self, batch_id, result, status, state=None, **kept):
        timer = PhaseTimer()
        timer.begin(2.0)
        progress = Progress(
            app="ads",
            batch_id=batch_id,
            at=self._now(),
            duration_ms=40.0,
            emitted=result.emitted,
            **{name: result.total(name) for name in ("held", "filtered", "dead", "duplicate")},
            read=result.read(self.plan),
            late=result.late(self.plan),
            watermark=result.watermark,
            lag={},
            behind_s=0.5,
            state_bytes=result.state_bytes,
        )
        record = batch_record(progress, result, timer, self.run)
        told = {**progress.to_dict(), **status}
        return commit(self, batch_id, result, told, state, record, **kept)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(BatchCommitter, "commit", with_record)
        app.run(app.write())
    app.append(clicks(4, 5))
    return app


def test_top_prints_what_the_log_and_the_store_say(edited, done):
    (found,) = json.loads(done("top", "--json", "--log", str(edited.log)))
    assert (found["app"], found["running"], found["unread"]) == ("ads", False, 4)
    steps = {step["step"]: step for step in found["load"]["steps"]}
    assert steps["minutes"]["state_bytes"] > 0
    assert steps["clicks"]["read"] == 20
    assert found["load"]["batches"] == found["batch_id"] + 1
    shown = done("top", "ads", "--once", "--log", str(edited.log))
    for words in ("ads  stopped", "4 unread", "minutes", "clicks/1", "plan"):
        assert words in shown


def test_top_adds_up_nothing_of_a_store_that_was_replaced(edited, tmp_path):
    log = tmp_path / "log"
    shutil.copytree(edited.log, log)
    folder = log / "apps" / "ads"
    with open_state_store(folder / STATE_STORE_FILE, readonly=True) as store:
        watched = _WatchedApp(
            "ads", store, AppStatus("ads", log, folder), folder / STATE_STORE_FILE
        )
        assert watched.to_dict()["totals"]["read"] == 20
        with open_state_store(tmp_path / STATE_STORE_FILE):
            pass  # of an app that has read nothing
        for leftover in folder.glob(f"{STATE_STORE_FILE}-*"):
            leftover.unlink()
        shutil.move(tmp_path / STATE_STORE_FILE, folder / STATE_STORE_FILE)
        assert watched.to_dict()["totals"]["read"] == 0


def test_top_refuses_what_it_cannot_show(edited, call, tmp_path):
    assert "has no app 'adds'" in call("top", "adds", "--log", str(edited.log)).err
    assert "is too short" in call("top", "--every", "1 millisecond", "--log", str(edited.log)).err
    assert "No app has run" in call("top", "--log", str(tmp_path / "none")).err


def test_why_behind_says_what_is_unread_and_what_takes_the_time(edited, done):
    shown = done("why", "behind", "ads", "--log", str(edited.log))
    assert "ads has 4 unread records." in shown
    assert "It does not run: it was stopped." in shown
    assert "The step that works longest is" in shown
    found = json.loads(done("why", "behind", "ads", "--json", "--log", str(edited.log)))
    assert sum(found["partitions"].values()) == found["unread"] == 4


def test_why_follows_a_record_and_a_value_from_the_command_line(edited, done, call):
    file = str(edited.file)
    found = json.loads(done("why", "record", file, "clicks/0/0", "--json"))
    assert found["batch_id"] == 0  # the history knows it
    assert done("why", "record", file, "clicks/0/0").startswith(f"clicks/0/0: {found['outcome']}")
    newest = json.loads(done("why", "value", file, "newest", "ad=a1", "--json"))
    assert newest["row"]["ad"] == "a1"
    assert newest["same"]
    assert "1 record is behind it" in done("why", "value", file, "newest", "ad=a1")
    assert "is no record" in call("why", "record", file, "clicks").err
    assert "is not COLUMN=VALUE" in call("why", "value", file, "newest", "a1").err
