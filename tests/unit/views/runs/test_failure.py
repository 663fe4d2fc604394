"""How the last run of an app failed is known, by error or by kill, until a later run ends well."""

import json
from contextlib import ExitStack

import pytest

from millstream.errors import ConfigError, CorruptionError, FencedError, FolderOwnedError
from millstream.views.runs.control_files import hold_run_lock
from millstream.views.runs.failure import last_failure, record_failure


def fails_with(folder, error, at=1000.0):
    with pytest.raises(type(error)), record_failure(folder, lambda: at):
        raise error


@pytest.mark.parametrize(
    ("error", "kind", "advice"),
    [
        (ConfigError("wrong."), "ConfigError", "Correct the declaration"),
        (
            FolderOwnedError("taken."),
            "FolderOwnedError",
            "The cause is temporary: run the app again",
        ),
        (CorruptionError("damaged."), "CorruptionError", "millstream log verify"),
        (ZeroDivisionError("division"), "ZeroDivisionError", "spark.log"),
    ],
)
def test_an_error_is_kept_with_its_time_and_what_to_do(tmp_path, error, kind, advice):
    fails_with(tmp_path, error)
    failure = last_failure(tmp_path)
    assert (failure.kind, failure.at) == (kind, 1000.0)
    assert str(error) in failure.reason
    assert advice in failure.advice


def test_while_a_run_is_alive_nothing_has_failed_and_one_that_ends_well_forgets_the_failure(
    tmp_path,
):
    fails_with(tmp_path, ConfigError("wrong."))
    with hold_run_lock(tmp_path, 2):
        assert last_failure(tmp_path) is None
    assert last_failure(tmp_path) is not None
    with record_failure(tmp_path):
        pass
    assert last_failure(tmp_path) is None


def test_a_run_that_was_replaced_has_not_failed(tmp_path):
    fails_with(tmp_path, FencedError("a newer one"))
    assert last_failure(tmp_path) is None


def left_behind(folder, since):
    (folder / "running-3.json").write_text(json.dumps({"run": 3, "pid": 77, "since": since}))


def test_a_run_that_was_killed_is_known_by_what_it_left_behind(tmp_path):
    left_behind(tmp_path, 5.0)
    failure = last_failure(tmp_path)
    assert (failure.kind, failure.at) == ("Killed", 5.0)
    assert "process 77 is gone" in failure.reason


@pytest.mark.parametrize(("since", "kind"), [(999.0, "ConfigError"), (1001.0, "Killed")])
def test_of_a_failure_and_a_kill_the_later_is_told(tmp_path, since, kind):
    fails_with(tmp_path, ConfigError("wrong."), at=1000.0)
    left_behind(tmp_path, since)
    assert last_failure(tmp_path).kind == kind


def test_the_failure_is_in_its_place_before_the_run_says_that_it_runs_no_more(tmp_path):
    seen = []
    with pytest.raises(ConfigError), ExitStack() as running:
        running.callback(lambda: seen.extend(path.name for path in tmp_path.iterdir()))
        with record_failure(tmp_path):
            running.enter_context(hold_run_lock(tmp_path, 1))
            raise ConfigError("wrong.")
    assert "failed.json" in seen


def test_where_it_cannot_be_kept_the_error_itself_is_still_raised(tmp_path):
    fails_with(tmp_path / "gone", ConfigError("wrong."))
    assert last_failure(tmp_path / "gone") is None


def test_a_file_of_another_version_is_no_failure(tmp_path):
    (tmp_path / "failed.json").write_text('{"other": 1}')
    assert last_failure(tmp_path) is None
