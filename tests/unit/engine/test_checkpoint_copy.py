"""A checkpoint that is made again from its copy: whole, and only where it is not there already."""

import json
import shutil

import pytest

from millstream.engine import checkpoint_copy
from millstream.engine.checkpoint_copy import CheckpointCopy, may_be_elsewhere, offset_of_batch
from millstream.kernels.plan import JobPlan
from millstream.kernels.state.keyhash import Buckets
from millstream.object_store.address import parse_state_url
from millstream.object_store.place import StatePlace
from millstream.views.store_location import open_state_store

PLACE = StatePlace(parse_state_url("s3://bucket"), "one")


def checkpoint_of(folder, plans, done):
    for name in ("offsets", "commits"):
        (folder / name).mkdir(parents=True)
    (folder / "millstream-checkpoint-id").write_text("id")
    (folder / "metadata").write_text("query")
    for number in range(plans):
        (folder / "offsets" / str(number)).write_text(f"plan {number}")
        if number < done:
            (folder / "commits" / str(number)).write_text('v1\n{"nextBatchWatermarkMs":0}')
    return folder


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def kept(folder, last):
    return CheckpointCopy.from_message(CheckpointCopy.read(folder, last).to_message())


@pytest.mark.parametrize("committed", [False, True])
def test_another_folder_gets_the_last_two_plans_and_what_was_committed(tmp_path, committed):
    copy = kept(checkpoint_of(tmp_path / "one", 4, 3), 3)
    elsewhere = tmp_path / "two"
    assert copy.restore(elsewhere, 4 if committed else 3)
    commits = ["commits/2", "commits/3"] if committed else ["commits/2"]
    rest = ["metadata", "millstream-checkpoint-id", "offsets/2", "offsets/3"]
    assert names(elsewhere) == [*commits, *rest]
    assert (elsewhere / "offsets/3").read_text() == "plan 3"
    assert not copy.restore(elsewhere, 4)
    assert names(tmp_path) == [
        *(f"one/{name}" for name in names(tmp_path / "one")),
        *(f"two/{name}" for name in names(elsewhere)),
    ]


def test_where_a_batch_ended_is_what_the_state_store_says_and_not_what_another_folder_had_planned(
    tmp_path,
):
    checkpoint_of(tmp_path / "one", 4, 4)
    here = checkpoint_of(tmp_path / "two", 4, 3)
    for folder, end in ((tmp_path / "one", 7), (here, 5)):
        for number in (1, 3):
            plan = json.dumps({"topics": {"t": [[end + number]]}})
            (folder / f"offsets/{number}").write_text(f"v1\n{{}}\n{plan}")
    copy = kept(tmp_path / "one", 3)
    with open_state_store(tmp_path / "views.db") as store:
        ends = [
            offset_of_batch(store, "ads", here, number)
            for put in (None, copy.to_message())
            for _ in [store.put_description("ads", checkpoint_copy.DESCRIPTION, put)]
            for number in (1, 3)
        ]
        assert offset_of_batch(store, "ads", here, 9) is None
    # Only the last two are in the copy.
    assert [end["topics"]["t"][0][0] for end in ends] == [6, 8, 6, 10]


def test_a_checkpoint_that_agrees_stays_as_it_is_even_with_a_plan_on_which_nobody_acted(tmp_path):
    here = checkpoint_of(tmp_path / "one", 5, 4)
    before = names(here)
    assert not kept(here, 4).restore(here, 5)
    assert not kept(here, 3).restore(here, 4)
    assert names(here) == before


@pytest.mark.parametrize("change", ["older", "newer", "another plan", "another id", "no query"])
def test_a_checkpoint_that_does_not_agree_is_replaced(tmp_path, change):
    copy = kept(checkpoint_of(tmp_path / "one", 4, 3), 3)
    plans = {"older": 2, "newer": 6}.get(change, 4)
    here = checkpoint_of(tmp_path / "two", plans, 2)
    if change == "another plan":
        (here / "offsets/3").write_text("plan of others")
    if change == "another id":
        (here / "millstream-checkpoint-id").write_text("other")
    if change == "no query":
        (here / "metadata").unlink()
    assert copy.restore(here, 3)
    assert CheckpointCopy.read(here, 3) == copy
    assert max(int(name.split("/")[1]) for name in names(here) if name[:7] == "offsets") == 3


@pytest.mark.parametrize("at", range(5))
def test_a_death_while_it_is_made_leaves_what_the_next_run_makes_whole(tmp_path, monkeypatch, at):
    copy = kept(checkpoint_of(tmp_path / "one", 4, 3), 3)
    here = checkpoint_of(tmp_path / "two", 2, 1)
    passed = iter(range(100))

    def dying(real):
        def call(*given, **named):
            if next(passed) == at:
                raise KeyboardInterrupt
            return real(*given, **named)

        return call

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_copy, "replace_file", dying(checkpoint_copy.replace_file))
        patch.setattr(shutil, "rmtree", dying(shutil.rmtree))
        with pytest.raises(KeyboardInterrupt):
            copy.restore(here, 3)
    assert copy.restore(here, 3)
    assert CheckpointCopy.read(here, 3) == copy


def test_a_job_may_move_if_nothing_of_it_is_in_its_folder(tmp_path):
    stages, nothing = (JobPlan("a", (), (), found, (), Buckets(1)) for found in (("stage",), ()))
    native = JobPlan("a", (), ("native",), (), (), Buckets(1))
    store = "an address"
    assert may_be_elsewhere(stages, PLACE, store)
    assert may_be_elsewhere(nothing, None, store)
    assert not may_be_elsewhere(stages, None, store)
    assert not may_be_elsewhere(native, PLACE, store)
    assert not may_be_elsewhere(stages, PLACE, tmp_path)
