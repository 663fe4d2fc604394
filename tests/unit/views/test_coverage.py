"""Outputs that come and go: each says what it covers, and readers of an incomplete one are warned."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import polars as pl
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import millstream as ms
from millstream.cli.main import run as command
from millstream.kernels.plan import (
    DatasetSinkSpec,
    JobPlan,
    Program,
    SinkPlan,
    TopicSinkSpec,
    ViewSinkSpec,
)
from millstream.kernels.state.keyhash import Buckets
from millstream.testing.disk import SimulatedCrash
from millstream.views.commit.committer import BatchResult
from millstream.views.commit.open_committer import open_committer
from millstream.views.coverage import (
    BatchBoundary,
    CoverageSpan,
    OutputCoverage,
    is_complete,
    last_covered,
    next_coverage,
    partial_note,
)
from millstream.views.sinks.dataset import DatasetSink
from millstream.views.state_store.sqlite_store import SqliteStateStore

COLUMNS = (("k", pl.String()), ("n", pl.Int64()))
AT = datetime(2026, 1, 1, 12, tzinfo=UTC)


@dataclass
class Job:
    """An app whose outputs change from run to run; every batch moves its one topic on by ten."""

    folder: Path
    url: str | None = None

    @property
    def log(self) -> Path:
        return self.folder / "data"

    @property
    def state_store(self) -> Path:
        return self.log / "apps" / "app" / "views.db"

    def sink(self, name: str, port: int) -> SinkPlan:
        end: ViewSinkSpec | DatasetSinkSpec | TopicSinkSpec = ViewSinkSpec()
        if name.startswith("base"):
            end = ViewSinkSpec(self.url)
        elif name.startswith("rows"):
            end = DatasetSinkSpec(str(self.folder / name), ())
        elif name.startswith("to("):
            end = TopicSinkSpec(name[3:-1], "k", ("n",), 1, "delete")
        return SinkPlan(name, port, ("k",) if isinstance(end, ViewSinkSpec) else (), COLUMNS, end)

    def run(self, *names: str, batches: int = 1, **meanings: str) -> None:
        sinks = tuple(self.sink(name, 8 + n) for n, name in enumerate(names))
        program = Program(outputs={name: meanings.get(name, "as ever") for name in names})
        plan = JobPlan("app", (), (), (), sinks, Buckets(1), program=program)
        with open_committer(plan, self.state_store, self.log) as committer:
            committer._now = lambda: AT
            first = committer.begin_run("main", "one")
            for batch_id in range(first, first + batches):
                rows = pl.DataFrame({"k": [str(batch_id)], "n": [batch_id]})
                result = BatchResult(
                    rows=dict.fromkeys(names, rows), position={"t": {"0": 10 * batch_id + 10}}
                )
                committer.commit(batch_id, result, {})

    def spans(self, name: str) -> list[tuple[int | None, int | None]]:
        """Return the batches between which an output was written, as the state store has them."""
        with SqliteStateStore(self.state_store, readonly=True) as state_store:
            found = [one for (n, _), one in state_store.outputs("app").items() if n == name]
        return [between(span) for span in found[0].spans]


def between(span: CoverageSpan) -> tuple[int | None, int | None]:
    since, until = (end and end.batch_id for end in (span.since, span.until))
    return since, until


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path)


def test_an_output_that_was_always_there_is_whole(job):
    job.run("a")
    job.run("a", batches=0)
    job.run("a")
    with ms.view("a", log=job.log) as view:  # warnings are errors here
        assert is_complete(view.coverage)
        assert view.partial_note is None


def test_a_view_that_is_added_later_says_since_when_it_holds(job):
    job.run("a", batches=2)
    job.run("a", "b")
    assert job.spans("b") == [(2, None)]
    with pytest.warns(
        ms.PartialOutputWarning, match=r"'b' of the app 'app' is written since 2026-01-01T12"
    ):
        ms.view("b", log=job.log).close()
    with warnings.catch_warnings(action="ignore"), ms.view("b", log=job.log) as view:
        assert view.coverage[0].since == BatchBoundary(
            2, {"t": {"0": 20}}, "2026-01-01T12:00:00+00:00"
        )
        assert view.partial_note.endswith(
            "(batch 2; read up to t/0 20); what came out before is missing"
        )
    with ms.view("a", log=job.log) as view:
        assert view.partial_note is None


def test_a_view_that_was_left_out_for_one_run_has_a_gap(job):
    job.run("a", "b", batches=2)
    job.run("a", batches=3)
    assert job.spans("b") == [(None, 2)]
    job.run("a", "b")
    assert job.spans("b") == [(None, 2), (5, None)]
    with pytest.warns(ms.PartialOutputWarning, match=r"not written from .*batch 2.* to .*batch 5"):
        ms.view("b", log=job.log).close()


def test_a_view_that_is_left_out_says_so_from_the_beginning_of_that_run(job):
    job.run("a", "b")
    job.run("a", batches=0)
    with pytest.warns(ms.PartialOutputWarning, match=r"no longer written since .*batch 1"):
        ms.view("b", log=job.log).close()


def test_the_position_of_a_view_that_is_left_out_stays_where_it_was(job):
    job.run("a", "b")
    job.run("a", batches=2)
    with warnings.catch_warnings(action="ignore"), ms.view("b", log=job.log) as view:
        assert view.position == {"t": {"0": 10}}
        assert view.wait_for(batch_id=0, timeout_s=0)
        assert not view.wait_for(batch_id=1, timeout_s=0)
    job.run("a", "b", batches=0)
    with warnings.catch_warnings(action="ignore"), ms.view("b", log=job.log) as view:
        assert view.position == {"t": {"0": 30}}


def test_an_output_that_missed_no_batch_has_no_gap(job):
    job.run("a", "b")
    job.run("a", batches=0)
    job.run("a", "b")
    assert job.spans("b") == [(None, None)]


def test_a_renamed_view_is_a_new_one_and_the_old_one_ends(job):
    job.run("old")
    job.run("new")
    assert (job.spans("old"), job.spans("new")) == ([(None, 1)], [(1, None)])


def test_an_output_that_is_declared_otherwise_says_from_where_on(job):
    job.run("a")
    job.run("a", a="filtered")
    assert job.spans("a") == [(None, 1), (1, None)]
    with pytest.warns(ms.PartialOutputWarning, match=r"declared differently before .*batch 1"):
        ms.view("a", log=job.log).close()


def test_before_the_first_batch_outputs_come_and_go_freely(job):
    job.run("a", batches=0)
    job.run("b", "rows", batches=0)
    job.run("a", "b", "rows")
    assert [job.spans(name) for name in ("a", "b", "rows")] == [[(None, None)]] * 3


def test_a_dataset_says_since_when_it_holds(job):
    job.run("a")
    job.run("a", "rows")
    with pytest.warns(ms.PartialOutputWarning, match=r"The dataset .*rows is written since"):
        opened = ms.dataset(job.folder / "rows")
    assert [between(span) for span in opened.coverage] == [(1, None)]
    assert "what came out before is missing" in opened.partial_note


def test_the_state_store_has_the_coverage_of_topics(job):
    job.run("a")
    job.run("a", "to(out)")
    assert job.spans("to(out)") == [(1, None)]


def test_a_view_in_a_database_says_its_gap_even_while_it_is_left_out(tmp_path, database):
    job = Job(tmp_path, database)
    job.run("base1", "base2")
    job.run("base1", batches=2)
    with pytest.warns(ms.PartialOutputWarning, match=r"no longer written since .*batch 1"):
        left_out = ms.view("base2", store=database)
    with left_out:
        assert left_out.position == {"t": {"0": 10}}
    job.run("base1", "base2")
    with warnings.catch_warnings(action="ignore"), ms.view("base2", store=database) as view:
        assert [between(span) for span in view.coverage] == [(None, 1), (3, None)]
        assert view.position == {"t": {"0": 40}}
    with ms.view("base1", store=database) as view:
        assert is_complete(view.coverage)


def test_the_command_prints_a_note_beside_the_rows(job, capsys):
    job.run("a")
    job.run("a", "b")
    assert command(["view", "show", "b", "--log", str(job.log), "--json"]) == 0
    said = capsys.readouterr()
    assert "This view is incomplete: it is written since" in said.err
    assert said.out == '{"k": "1", "n": 1}\n'


# ── any sequence of runs ────────────────────────────────────────────────────────────────────

RUNS = st.lists(
    st.tuples(
        st.sets(st.sampled_from("abc"), min_size=1),
        st.integers(0, 2),
        st.sampled_from(["one", "two"]),
    ),
    min_size=1,
    max_size=8,
)


# Declared otherwise for no batch, left out, and back in that way before any batch.
@example([({"b"}, 1, "two"), ({"b"}, 0, "one"), ({"a"}, 0, "one"), ({"b"}, 1, "one")])
# Left out, back for no batch, and left out again: it reflects what it did.
@example([({"b"}, 1, "one"), ({"a"}, 2, "one"), ({"b"}, 0, "one"), ({"a"}, 0, "one")])
@given(RUNS)
def test_the_spans_of_an_output_are_just_the_batches_that_it_was_declared_in(runs):
    known: dict[tuple[str, str], OutputCoverage] = {}
    batch_id = 0
    took: dict[str, dict[int, str]] = {name: {} for name in "abc"}  # the rule: who took which batch
    for names, batches, meaning in runs:
        declared = {(name, "view"): OutputCoverage(meaning) for name in names}
        now = BatchBoundary(batch_id, {}, "")
        known = next_coverage(known, declared, now, lambda was, after: was == after)
        for number in range(batch_id, batch_id + batches):
            for name in names:
                took[name][number] = meaning
        batch_id += batches
    for (name, _), feeding in known.items():
        covered: set[int] = set()
        for span in feeding.spans:
            since, until = between(span)
            batches_in = set(range(since or 0, batch_id if until is None else until))
            assert not batches_in & covered
            assert len({took[name].get(number) for number in batches_in}) <= 1  # one declaration
            covered |= batches_in
        assert covered == took[name].keys()
        if covered and (end := last_covered(feeding.spans)) is not None:
            assert end[0] == max(covered)
        whole = took[name].keys() == set(range(batch_id)) and len({*took[name].values()}) <= 1
        assert is_complete(feeding.spans) == (partial_note(feeding.spans) is None)
        if is_complete(feeding.spans) or all(batches for _, batches, _ in runs):
            assert is_complete(feeding.spans) == whole


def test_a_crash_before_a_target_is_told_leaves_it_to_the_next_run(job, monkeypatch):
    job.run("a", "rows")
    job.run("a")

    def crash(*_):
        raise SimulatedCrash("before the dataset knows of the run")

    with monkeypatch.context() as patched:
        patched.setattr(DatasetSink, "begin_run", crash)
        with pytest.raises(SimulatedCrash):
            job.run("a", "rows")
    assert is_complete(ms.dataset(job.folder / "rows").coverage)  # not stored yet
    job.run("a", "rows", batches=0)
    with pytest.warns(ms.PartialOutputWarning, match="was not written from"):
        opened = ms.dataset(job.folder / "rows")
    assert (
        [between(span) for span in opened.coverage] == job.spans("rows") == [(None, 1), (2, None)]
    )
