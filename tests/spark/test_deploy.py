"""An edited app is deployed between two runs on Spark: what is kept goes on, and what was rebuilt, too."""

import json

from edited_app import EDIT, EditedApp, answers, edited_answers, events

from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change


def run(app, spark):
    return app.run(until="caught-up", show=False)


def test_the_next_run_on_spark_goes_on_with_what_was_deployed(tmp_path, spark, in_workers):
    edited = EditedApp(tmp_path, 4)
    edited.create()
    rows = events(400, 1)
    edited.append(rows)
    app = edited.write()
    assert run(app, spark).read == 400
    assert edited.views(app) == answers(rows)
    app = edited.write(*EDIT)
    plan = plan_change(app)
    assert (plan.verdict, plan.records) == ("rebuilds", 400)
    assert plan.seconds is not None
    assert deploy(app, rows_per_batch=90).records == 400
    assert edited.views(app) == edited_answers(rows)
    for seed in (2, 3):
        more = events(100, seed, first=len(rows))
        edited.append(more)
        rows += more
        report = run(app, spark)
        assert report.read == 100
        assert json.loads(json.dumps(report.to_dict()))["dead"] == 0
        assert edited.views(app) == edited_answers(rows)
    assert plan_change(app).verdict == "keeps"
    back = edited.write()  # the file as it was
    assert deploy(back).records == 200  # what came since
    assert run(back, spark).read == 0
    assert edited.views(back) == answers(rows)
