"""The ledger of an operator's state: of a slot that is over, all that came in must have left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from millstream.errors import CorruptionError
from millstream.kernels.operator import OperatorState

_VALUE = "ledger"


@dataclass
class HeldEvents:
    """How many events came into each slot of an operator's state, and how many have left it.

    What came is counted when it arrives, before anything is merged; what left when it is read again
    for the last window that it is in. So an event that a merge, a fold or a look-up loses or doubles
    is missed when its slot is over. The counts lie in the operator's part of the manifest.
    """

    step: str
    slots: dict[int, list[int]]  # slot → came, left
    state: OperatorState

    @classmethod
    def of(cls, step: str, state: OperatorState) -> HeldEvents:
        """Take up the counts that the batch before has left."""
        stored = state.values.get(_VALUE, {})
        return cls(step, {int(slot): list(counts) for slot, counts in stored.items()}, state)

    def came(self, slot: int, events: int) -> None:
        """Count events that arrived."""
        self.slots.setdefault(slot, [0, 0])[0] += events

    def left(self, slot: int, events: int) -> None:
        """Count events that were read for the last time."""
        if events:
            self.slots.setdefault(slot, [0, 0])[1] += events

    def close(self, over: Iterable[int]) -> None:
        """Check the slots that are over, and leave the others' counts for the next batch.

        Raises:
            CorruptionError: events were lost or doubled; the batch must not be committed.
        """
        for slot in list(over):
            came, left = self.slots.pop(slot)
            if came != left:
                raise CorruptionError(
                    f"The ledger of step {self.step!r} does not balance: {came} events came into its "
                    f"state, and {left} left it when their windows were over. Nothing of this batch "
                    "was committed. Please report this; the log still holds every event."
                )
        self.state.values[_VALUE] = {str(slot): counts for slot, counts in self.slots.items()}
