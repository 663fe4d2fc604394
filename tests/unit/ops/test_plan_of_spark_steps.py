"""What a plan says of an app with a step of Spark's own, whose rows no deployment computes."""

import pytest
from edited_app import EDIT, SOURCE, EditedApp, answers, events

from millstream.errors import ConfigError
from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change

NATIVE = """

def dear_ones(frame):
    return frame.where("cost > 3")


dear = stream.select("ad", "cost", "at").spark(
    dear_ones, schema={"ad": str, "cost": int, "at": datetime}, name="on_spark")
dear.view("native", key="at")
"""


@pytest.fixture
def edited(tmp_path):
    """An app that has run, to which a step of Spark's own is added."""
    edited = EditedApp(tmp_path, 2)
    edited.create()
    edited.append(events(20, 1))
    edited.run(edited.write())
    edited.source = SOURCE + NATIVE
    return edited


def test_an_added_step_of_sparks_own_takes_effect_at_a_stated_position(edited):
    plan = plan_change(edited.write())
    assert (plan.verdict, plan.exit_code, plan.records) == ("keeps", 0, 0)
    (native,) = [part for part in plan.change.parts if part.name == "native"]
    assert native.why[0].startswith("it is new, and is written from ")
    assert "(batch 1; read up to clicks/0 10, clicks/1 10)" in native.why[0]


def test_beside_a_step_of_sparks_own_nothing_is_rebuilt_and_the_plan_names_the_step(edited):
    app = edited.write(*EDIT)
    plan = plan_change(app)
    assert (plan.verdict, plan.exit_code, plan.records) == ("refuses", 4, 0)
    assert "it has steps of Spark's own ('on_spark')" in plan.change.refusals[0]
    with pytest.raises(ConfigError, match=r"'on_spark'.*give the app another name"):
        deploy(app)
    assert edited.views(app) == answers(events(20, 1))
