"""A run says which topics it created, and a report that nothing could be read of them."""

import millstream as ms
from millstream.engine.job import create_topics
from millstream.views.runs.progress import Report, describe_created_topic


def test_topics_that_a_run_creates_are_named_with_those_that_were_there(tmp_path):
    with ms.connect(tmp_path) as log:
        log.create_topic("clicks")
    app = ms.App("a", log=tmp_path)
    app.topic("clcks", {"ad": str}).stream().view("v", key="ad")
    created = create_topics(app.job())
    assert (created.names, created.others) == (("clcks",), ("clicks",))
    assert describe_created_topic("clcks", created.others) == (
        "created topic 'clcks' (it did not exist; topics here: clicks). Did you mean 'clicks'?"
    )
    assert create_topics(app.job()).names == ()


def test_in_a_folder_that_is_new_every_topic_is_created(tmp_path):
    app = ms.App("a", log=tmp_path / "new")
    app.topic("clicks", {"ad": str}).stream().view("v", key="ad")
    created = create_topics(app.job())
    assert (created.names, created.others) == (("clicks",), ())
    assert "topics here: none)" in describe_created_topic("clicks", ())


def test_a_report_over_topics_that_were_created_says_that_nothing_was_read():
    report = Report("a", "caught-up", 1, 1.0, 0, 0, 0, 0, 0, None, {}, created_topics=("clcks",))
    assert "created topic 'clcks'" in str(report)
    assert "nothing was read: look at the names of the topics" in str(report)
    assert report.ok
    assert not Report(
        "a", "caught-up", 1, 1.0, 2, 0, 0, 2, 0, None, {}, failed_steps=("clicks",)
    ).ok
