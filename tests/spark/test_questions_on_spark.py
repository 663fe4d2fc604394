"""A job on Spark that is asked while it runs, by its own process and over HTTP; with its runs in its folder, or at a URL."""

import pytest
from tests.question_model import (
    STEPS,
    Expected,
    answered_rows,
    draw_records,
    question_app,
    write_records,
)

import millstream as ms

LONG = "5 minutes"


@pytest.mark.parametrize("place", ["folder", "url"])
def test_a_running_job_is_asked_between_its_batches(spark, in_workers, tmp_path, place):
    records = draw_records(31, 120, 2)
    write_records(tmp_path, records, 2)
    options = {} if place == "folder" else {"state": f"file://{tmp_path}/runs"}
    app, other = (question_app(tmp_path, **options) for _ in range(2))
    asked = []

    def check(progress):
        answer = other.ask("everything", names=[*STEPS], deadline=LONG)
        assert (answer.running, answer.batch_id) == (True, progress.batch_id)
        expected = Expected(records, answer.position, 2)
        for name in STEPS:
            assert answered_rows(name, answer.value[name]) == expected.rows(name), name
        over_http = ms.ask(serving.url, "minutes", ad=3, deadline=LONG)
        assert over_http.batch_id == progress.batch_id
        asked.append(progress.batch_id)

    with app.serve_questions("127.0.0.1:0") as serving:
        report = app.run(until="caught-up", rows_per_batch=60, on_progress=check)
    assert report.ok
    assert len(asked) >= 2
    assert other.ask("minutes", ad=3).running is False
    for one in (app, other):
        one.close_questions()
