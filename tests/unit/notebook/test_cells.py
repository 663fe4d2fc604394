import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.errors import ConfigError
from millstream.notebook.cells import PROGRAM, cell_run, is_newest

APP = """
import datetime
from dataclasses import dataclass
import polars as pl
import millstream as ms
app = ms.App("ads")
"""
TOPIC = """
@dataclass
class Click:
    ad: str
    at: datetime.datetime
topic = app.topic("clicks", Click, key="ad")
"""
STREAM = 'stream = topic.stream(time="at").filter(pl.col("ad") != "x")'
VIEW = """
counts = stream.filter(pl.col("ad") != "y").window(ms.tumbling("1 minute"), by="ad").agg(n=ms.count())
counts.view("counts")
"""
LATEST = 'stream.filter(pl.col("ad") != "z").view("latest", key="ad")'
CELLS = {"topic": TOPIC, "stream": STREAM, "view": VIEW, "latest": LATEST}
ABOVE = {
    "topic": (),
    "stream": ("topic",),
    "view": ("topic", "stream"),
    "latest": ("topic", "stream"),
}
OUTPUTS = {"view": "counts", "latest": "latest"}


def run_all(cells, *names):
    for name in names or ("app", *CELLS):
        assert cells.run({"app": APP, **CELLS}[name], name) is None


def steps(cells):
    return sorted(cells.value("app").plan().steps)


def test_a_program_has_no_cells():
    assert cell_run() == PROGRAM
    assert is_newest(PROGRAM)


def test_a_cell_that_runs_again_declares_the_same(cells):
    run_all(cells)
    first = steps(cells)
    assert first == sorted(
        [
            "clicks",
            "filter(ad)",
            "filter(ad) #2",
            "filter(ad) #3",
            "tumbling(1 minute) by ad",
            "counts",
            "latest",
        ]
    )
    run_all(cells, "view")
    assert steps(cells) == first
    run_all(cells, "topic", "stream", "latest", "view")
    assert steps(cells) == first
    run_all(cells)
    assert steps(cells) == first


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.lists(st.sampled_from([*CELLS]), max_size=12))
def test_cells_that_run_in_any_order_give_what_their_newest_runs_declare(cells, order):
    """The model: a cell's outputs count if no cell above them has run since; else the app says so."""
    run_all(cells)
    ran = {name: number for number, name in enumerate(CELLS)}
    made_of = {name: {above: ran[above] for above in ABOVE[name]} for name in CELLS}
    for number, name in enumerate(order, start=len(ran)):
        run_all(cells, name)
        # What a variable holds is of the run that set it, and of what that was made of.
        made_of[name] = {
            above: number_of
            for parent in ABOVE[name][-1:]
            for above, number_of in ({parent: ran[parent]} | made_of[parent]).items()
        }
        ran[name] = number
    stale = [
        OUTPUTS[name]
        for name in OUTPUTS
        if any(ran[above] != known for above, known in made_of[name].items())
    ]
    if not stale:
        names = steps(cells)
        assert len(set(names)) == len(names) == 7
        assert set(OUTPUTS.values()) <= set(names)
    else:
        with pytest.raises(ConfigError, match="before it ran again") as raised:
            cells.value("app").plan()
        assert any(repr(name) in str(raised.value) for name in stale)
    run_all(cells, *CELLS)
    assert len(steps(cells)) == 7


def test_an_output_that_an_edited_cell_leaves_out_is_gone(cells):
    run_all(cells)
    assert cells.run("pass", "latest") is None
    assert [output.name for output in cells.value("app").plan().sinks] == ["counts"]


def test_a_class_and_a_function_that_are_defined_again_are_the_same(cells):
    code = """
def loud(frame):
    return frame.with_columns(loud=pl.col("ad").str.to_uppercase())
stream.map_frames(loud).view("loud", key="ad")
"""
    run_all(cells)
    assert cells.run(code, "loud") is None
    program = cells.value("app").plan().program
    run_all(cells, *CELLS)
    assert cells.run(code, "loud") is None
    assert cells.value("app").plan().program == program


def test_two_cells_with_one_name_are_refused_and_the_first_is_named(cells):
    run_all(cells)
    error = cells.run(LATEST, "another")
    assert isinstance(error, ConfigError)
    assert "The view 'latest' is declared twice, before in cell [5]" in str(error)
    error = cells.run(TOPIC, "another")
    assert "Topic 'clicks' is declared twice, before in cell [2]" in str(error)


def test_one_cell_with_one_name_twice_is_refused(cells):
    run_all(cells)
    error = cells.run(f"{LATEST}\n{LATEST}", "latest")
    assert "The view 'latest' is declared twice. Give one another name." in str(error)


def test_a_cell_without_an_id_is_known_by_its_text(cells):
    for code in (APP, *CELLS.values()):
        assert cells.run(code) is None
    first = steps(cells)
    assert cells.run(VIEW) is None
    assert steps(cells) == first


def test_questions_of_a_cell_that_runs_again_are_replaced(cells):
    run_all(cells)
    code = "@app.question('how')\ndef how(state): return 1"
    assert cells.run(code, "question") is None
    assert cells.run(code, "question") is None
    error = cells.run(code, "another")
    assert "The question 'how' is declared twice" in str(error)


def test_an_error_shows_the_lines_of_the_cell_alone(cells, capsys):
    run_all(cells)
    capsys.readouterr()
    cells.run('1 + 1\nstream.filter(pl.col("adn") == 1)', "wrong")
    shown = capsys.readouterr().out
    assert shown.splitlines() == [
        'In[6], line 2: stream.filter(pl.col("adn") == 1)',
        "ConfigError: filter(adn) uses the column 'adn'. The columns there are ad, at. Did you mean 'ad'?",
    ]


def test_with_xmode_verbose_an_error_shows_all_lines(cells, capsys):
    run_all(cells)
    cells.shell.run_line_magic("xmode", "Verbose")
    try:
        cells.run('stream.filter(pl.col("adn") == 1)', "wrong")
    finally:
        cells.shell.run_line_magic("xmode", "Context")
    assert "collection.py" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["app", "topic", "stream", "counts"])
def test_nothing_prints_its_inside(cells, name):
    run_all(cells)
    assert len(repr(cells.value(name))) < 200


def test_the_cells_of_the_page_run_and_run_again(cells, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).resolve().parents[3] / "docs" / "notebooks.md").read_text()
    blocks = re.findall(r"(?ms)^```python\n(.*?)^```", page)
    assert len(blocks) == 9
    for number, block in [*enumerate(blocks), *enumerate(blocks)]:
        assert cells.run(block, str(number)) is None, block
    assert cells.value("app").status.views["per_minute"] == 1
    shown = capsys.readouterr()
    assert "shop running: engine local" in shown.out
    assert "per_minute: 1 row, batch 0" in shown.out
    cells.value("view").close()


def test_tables_of_one_topic_of_transactions_are_declared_again_one_by_one(cells):
    table = """
%s = app.table("shop.%s", {"id": int, "n": int}, key="id", envelope=ms.debezium(transactions="shop.transaction"))
%s.view("%s")
"""
    first, second = table % (("users",) * 4), table % (("orders",) * 4)
    run_all(cells, "app")
    assert cells.run(first, "first") is None
    assert cells.run(second, "second") is None
    known = steps(cells)
    assert cells.run(second, "second") is None
    assert steps(cells) == known
    assert cells.run(first, "first") is None  # it has declared the topic of transactions
    with pytest.raises(ConfigError, match="'orders' was declared by"):
        cells.value("app").plan()
    assert cells.run(second, "second") is None
    assert steps(cells) == known


def test_a_topic_and_a_followed_view_that_an_edited_cell_leaves_out_are_not_created(cells):
    run_all(cells)
    cells.value("app").run(until="caught-up", engine="local")
    follow = """
other = ms.App("other")
typo = other.topic("clikcs", Click)
prices = other.view_table(ms.view("counts", app="ads"))
prices.view("prices")
"""
    assert cells.run(follow, "follow") is None
    following = cells.value("other")
    assert len(following.followed) == 1
    edited = follow.replace('other = ms.App("other")', "").replace("clikcs", "corrected")
    assert cells.run('other = ms.App("other")', "other") is None
    assert cells.run(edited.replace("corrected", "clikcs"), "follow") is None
    assert cells.run(edited, "follow") is None
    following = cells.value("other")
    assert len(following.followed) == 1
    assert set(following.topics) == set(following.partitions)
    assert "clikcs" not in following.topics
    assert cells.run("pass", "follow") is None
    following.drop_replaced()
    assert (following.followed, following.topics) == ((), {})
