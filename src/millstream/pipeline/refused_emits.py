"""What windows that depend on the events cannot emit, in one table: each with the reason, and what to do instead.

Everything else is offered: windows of every kind emit ``"final"``, ``"update"``, ``"discard"`` and ``"retract"``,
early and late by batch, by count and by running time, once, and in named panes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from millstream.errors import ConfigError
from millstream.kernels.sessions.spans import SessionWindow
from millstream.kernels.trigger import EachBatch, EmitStrategy, Trigger
from millstream.kernels.windows.count_windows import CountWindow
from millstream.kernels.windows.sliding_windows import Sliding
from millstream.pipeline.windows import EventWindow


@dataclass(frozen=True)
class RefusedEmit:
    """What one kind of windows cannot emit: over rows that are ``taken_back``, or (False) over others, or any.

    The reason is a text with ``{window}``, ``{policy}``, ``{trigger}``, the first that is refused, and ``{after}``,
    which says what the windows come after.
    """

    kind: type[EventWindow]
    taken_back: bool | None
    refuses: Callable[[EventWindow, EmitStrategy], bool]
    reason: str


def _fires(trigger: Trigger | None) -> bool:
    """Return whether rows come otherwise than with every batch."""
    return trigger not in (None, EachBatch())


_BY_BATCH = (
    "{window} over rows that are taken back emits with every batch what that changed, or nothing: emit's {trigger} "
    'is "batch" or None. For rows at other times, window what it emits by time.'
)

_REFUSED = (
    RefusedEmit(
        Sliding,
        None,
        lambda _, emission: emission.mode == "discard",
        '{window} cannot emit "discard": one event counts in many rows, and each row has its own look back, so '
        'there are no parts that add up over the rows. Choose "final", "update" or "retract".',
    ),
    RefusedEmit(
        Sliding,
        True,
        lambda _, emission: _fires(emission.early) or _fires(emission.late),
        _BY_BATCH,
    ),
    RefusedEmit(
        SessionWindow,
        True,
        lambda window, _: isinstance(window, SessionWindow) and window.strict,
        "{after}, with strict=True: what it calls late would depend on events that are gone. Leave strict out, and "
        'look at overlaps_closed; or emit "final" above.',
    ),
    RefusedEmit(
        SessionWindow,
        True,
        lambda _, emission: emission.panes,
        "{after}. It emits how its sessions change, without panes: leave panes=True out of emit, or emit "
        '"final" above.',
    ),
    RefusedEmit(
        SessionWindow,
        True,
        lambda _, emission: not emission.suppress_unchanged,
        "{after}. It emits how its sessions change, without panes: leave suppress_unchanged=False out of emit, or "
        'emit "final" above.',
    ),
    RefusedEmit(
        SessionWindow,
        True,
        lambda _, emission: _fires(emission.early) or _fires(emission.late),
        _BY_BATCH,
    ),
    RefusedEmit(
        CountWindow,
        True,
        lambda _, emission: emission.mode != "final",
        "{after}. One row more or less moves a row of each later window of the key, so a window is emitted when "
        'nothing can be taken back any more: as "final". Leave emit out; or emit "final" above.',
    ),
    RefusedEmit(
        CountWindow,
        True,
        lambda _, emission: emission.late_policy != "drop",
        '{after}, and after late="{policy}". A row that comes too late is left out there, and counted: leave late '
        "out.",
    ),
    RefusedEmit(
        CountWindow,
        False,
        lambda _, emission: _fires(emission.late),
        "count_window has no late rows: it has no end in time, so no event is late for it. Leave emit's late out.",
    ),
    RefusedEmit(
        CountWindow,
        False,
        lambda _, emission: emission.late_policy != "drop",
        'count_window comes after late="{policy}", but no event is late for it. Leave it out.',
    ),
)


def check_emitted(window: EventWindow, emission: EmitStrategy, *, taken_back: bool) -> None:
    """Make sure that windows can emit as they are asked to; ``taken_back``: over rows that may be.

    Raises:
        ConfigError: they cannot.
    """
    for refused in _REFUSED:
        if not isinstance(window, refused.kind) or refused.taken_back not in (None, taken_back):
            continue
        if refused.refuses(window, emission):
            raise ConfigError(
                refused.reason.format(
                    window=window,
                    policy=emission.late_policy,
                    trigger="early" if _fires(emission.early) else "late",
                    after=f'{window} comes after emit("retract"), whose rows take others back',
                )
            )
