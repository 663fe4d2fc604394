"""A decider that is a small class, with commands, events and a state of pydantic: all that a store does with them."""

from __future__ import annotations

from pathlib import Path

import pydantic
import pytest
from unit.sourcing.test_hostile import note

import millstream as ms
from millstream.sourcing.store import EventStore


class Measure(pydantic.BaseModel):
    value: int


class Undo(pydantic.BaseModel):
    pass


class Measured(pydantic.BaseModel):
    value: int


class Undone(pydantic.BaseModel):
    value: int


class Readings(pydantic.BaseModel):
    values: list[int] = []


class Meter:
    """Readings, of which the last can be undone; none is negative."""

    state = Readings

    def initial(self) -> Readings:
        return Readings()

    def decide(self, command: Measure | Undo, state: Readings) -> list[Measured | Undone]:
        if isinstance(command, Undo):
            return [Undone(value=state.values[-1])] if state.values else []
        if command.value < 0:
            raise ms.CommandRejectedError(f"{command.value} is below 0; measure again")
        return [Measured(value=command.value)]

    def evolve(self, state: Readings, event: Measured | Undone) -> Readings:
        if isinstance(event, Undone):
            return Readings(values=state.values[:-1])
        return Readings(values=[*state.values, event.value])


def event_types() -> ms.EventTypes:
    types = ms.EventTypes()
    types.register("measured")(Measured)
    types.register("undone")(Undone)
    return types


def open_meters(log: ms.EventLog) -> EventStore:
    return EventStore(log, "m", Meter(), event_types(), snapshot_every=2, rejections="record")


def test_a_class_with_pydantic_models_is_decided_stored_folded_projected_and_refused(
    log: ms.EventLog, tmp_path: Path
) -> None:
    sums = ms.Projection("sums", {"sums": "value INTEGER"}, note)
    for _ in range(2):  # the second store begins with the snapshot of the first
        with open_meters(log) as store:
            for value in (3, 4, 5):
                store.handle("a", Measure(value=value))
            done = store.handle("a", Undo(), command_id="undo")
            assert done.events == [Undone(value=5)]
            with pytest.raises(ms.CommandRejectedError, match="-1 is below 0"):
                store.handle("a", Measure(value=-1), who="ada")
    with open_meters(log) as store, store.project(sums, tmp_path / "v.db") as view:
        assert store.load("a").state == Readings(
            values=[3, 4, 3, 4, 5]
        )  # the second undo is a repeat
        assert store.state_at("a", 3).state == Readings(values=[3, 4, 5])
        assert list(store.verify_snapshots()) == [("a", None)]
        view.catch_up()
        assert view.query("SELECT sum(value) FROM sums") == [(29,)]
        assert store.handle("b", Undo()).version == 0  # nothing followed
    refused = [one.json() for one in log.consumer("m.rejections", follow=False)]
    assert [one["command"] for one in refused] == [{"value": -1}] * 2
    assert {one["command_type"] for one in refused} == {"Measure"}
