"""Runs the histories of ``histories.py``, and shows that they find bugs that were put in."""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from millstream.log.group_commit import GroupCommit
from millstream.log.partition import Partition
from millstream.log.producers import ProducerStates
from millstream.log.recovery import Recovery
from millstream.log.segment import Segment
from millstream.log.transactions import TransactionCoordinator


def load() -> ModuleType:
    path = Path(__file__).with_name("histories.py")
    spec = importlib.util.spec_from_file_location("histories", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["histories"] = module  # so that other processes can import it
    spec.loader.exec_module(module)
    return module


histories = load()


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """The log reports every repair, and there are many here."""
    logging.disable(logging.ERROR)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, 100, 25))
def test_every_promise_holds_in_a_few_histories(first: int) -> None:
    acknowledged, _ = histories.run_many(first, 25)
    assert acknowledged > 200, "the histories did too little to mean anything"


@pytest.mark.thorough
@pytest.mark.timeout(1500)
def test_every_promise_holds_in_four_thousand_histories() -> None:
    acknowledged, damaged = histories.run_parallel(0, 4_000)
    assert acknowledged > 44_000
    assert damaged < 200


def acknowledge_before_the_sync(patch: pytest.MonkeyPatch) -> None:
    def forget(_self: GroupCommit, partitions: list[Partition]) -> None:
        for partition in partitions:
            partition.dirty = False

    patch.setattr(GroupCommit, "_sync", forget)


def forget_to_cut_a_torn_tail(patch: pytest.MonkeyPatch) -> None:
    before = Segment.__init__

    def behind_what_is_there(self: Segment, *arguments: object, **options: object) -> None:
        before(self, *arguments, **options)  # type: ignore[arg-type]
        self.size = self._files.size(self._handle)

    patch.setattr(Recovery, "_cut", lambda *_, **__: None)
    patch.setattr(Segment, "__init__", behind_what_is_there)


def use_an_offset_again(patch: pytest.MonkeyPatch) -> None:
    before = Partition.__init__

    def one_less(self: Partition, *arguments: object, **options: object) -> None:
        options["log_end_offset"] = max(int(str(options["log_end_offset"])) - 1, 0)
        before(self, *arguments, **options)  # type: ignore[arg-type]

    patch.setattr(Partition, "__init__", one_less)


def forget_the_decisions_of_transactions(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TransactionCoordinator, "recover", lambda _: None)


def forget_what_was_aborted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Segment, "append_aborted", lambda *_: None)


def take_every_batch_for_a_new_one(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProducerStates, "duplicate_of", lambda *_: None)


def keep_what_was_reserved_and_not_written(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ProducerStates, "rollback", ProducerStates.commit)


@pytest.mark.parametrize(
    "plant",
    [
        acknowledge_before_the_sync,
        forget_to_cut_a_torn_tail,
        use_an_offset_again,
        forget_the_decisions_of_transactions,
        forget_what_was_aborted,
        take_every_batch_for_a_new_one,
        keep_what_was_reserved_and_not_written,
    ],
)
def test_a_bug_that_is_put_in_is_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        histories.run_many(0, 4000)  # the rarest shows in one of two hundred
