"""Sessions as the published rules have them, one event after another: slow, plain, and not vectorised.

Events are taken in the order in which a watermark that follows their partitions would meet them: by
what the partition had reached before the event (``reached``), then by their place. In that order the
rules of Beam and Kafka need no intervals:

1. Before an event, every session that nothing can join any more, as of ``reached``, has had its on-time
   pane; and once the lateness is over too, it is closed for good (Kafka: an event exactly a gap after
   the last one still joins, so the session is closed only when the time is beyond that).
2. The event makes a session of its own, and merges all of its key's sessions that are not closed and
   that it touches (Beam, Spark, Kafka).
3. If its own session would be closed already it is late, unless it merges with one that is not: one
   that reaches back to it without having been cut short itself (see the decision on sessions).
4. A session that touches closed ones, which it would have merged, overlaps them; ``strict`` calls the
   event late instead.

Panes are as the Dataflow model has them: early, on time, late; by count. With ``once`` the first pane of a
session finishes it, and a merged session is finished if one of its parts is (Beam, ``AfterPane.onMerge``): what it
gets then, or has in no pane yet, is left out. Whole numbers stand for time.
"""

from collections import Counter
from dataclasses import dataclass, field

NEVER = 10**15


@dataclass
class Rules:
    inclusive: bool = True
    lateness: int = 0
    max_length: int | None = None
    strict: bool = False
    mode: str = "final"  # or update, discard, retract, correct
    early: int | None = None  # panes by count
    late: int | None = None
    apart_by_end: bool = False
    once: bool = False


@dataclass
class EmittedPane:
    start: int
    end: int
    values: tuple


@dataclass
class Open:
    start: int
    end: int
    last: int  # the last time at which an event would join it
    back: int  # the earliest time at which it could still be joined, when its events came
    values: list
    overlaps: bool = False
    fresh: list = field(default_factory=list)
    emitted: list = field(default_factory=list)
    panes: int = 0
    done: bool = False


class Sessions:
    """The sessions of one key."""

    def __init__(self, rules):
        self.rules = rules
        self.open = []
        self.closed = []  # (start, end, last, overlaps, values)
        self.late = []
        self.left_out = 0
        self.rows = Counter()  # (diff, start, end, values, overlaps, pane kind and index)

    # ── events ──────────────────────────────────────────────────────────────────────────────

    def take(self, ts, gap, value, reached):
        rules = self.rules
        self.pass_time(reached)
        end = ts + gap
        last = end if rules.inclusive else end - 1
        if rules.max_length:
            cut = (ts // rules.max_length + 1) * rules.max_length
            end, last = min(end, cut), min(last, cut - 1)
        oldest = reached - rules.lateness  # what ended before that is closed
        touched = [s for s in self.open if s.start <= last and ts <= s.last]
        own_is_over = last < oldest
        if own_is_over:
            touched = [s for s in touched if s.back <= last]
            if not touched:
                self.late.append(value)
                return
        overlaps = any(ts <= closed[2] for closed in self.closed)
        if overlaps and rules.strict:
            self.late.append(value)
            return
        back = last if own_is_over else max(ts, oldest)
        mine = Open(ts, end, last, back, [value], overlaps, [value])
        self.merge(mine, touched, reached)

    def merge(self, mine, touched, now):
        parts = sorted([*touched, mine], key=lambda s: (s.start, s.end))
        with_panes = [s for s in parts if s.panes]
        merged = Open(
            min(s.start for s in parts),
            max(s.end for s in parts),
            max(s.last for s in parts),
            min(s.back for s in parts),
            sorted(v for s in parts for v in s.values),
            any(s.overlaps for s in parts),
            sorted(v for s in parts for v in s.fresh),
            [t for s in parts for t in s.emitted],
            0 if len(with_panes) > 1 else sum(s.panes for s in with_panes),
        )
        self.open = [s for s in self.open if s not in touched] + [merged]
        merged.done = merged.last < now
        if self.rules.once and with_panes:
            merged.panes, self.left_out = 1, self.left_out + len(merged.fresh)
            merged.fresh = []
        count = self.rules.late if merged.done else self.rules.early
        if self.tells_panes and count and len(merged.fresh) >= count:
            self.fire(merged, "late" if merged.done else "early")

    # ── time ────────────────────────────────────────────────────────────────────────────────

    @property
    def tells_panes(self):
        return self.rules.mode != "final"

    def pass_time(self, now):
        for session in sorted(self.open, key=lambda s: (s.start, s.end)):
            if self.tells_panes:
                self.fire_what_is_due(session, now)
            if session.last + self.rules.lateness < now:
                self.open.remove(session)
                self.closed.append(
                    (session.start, session.end, session.last, session.overlaps, session.values)
                )

    def fire_what_is_due(self, session, now):
        if self.owed(session) <= min(now, session.last):
            self.fire(session, "early")
        if session.last < now and not session.done:
            self.fire(session, "on_time")
            session.done = True
        if self.owed(session) <= now:
            self.fire(session, "late")
        if session.last + self.rules.lateness < now and self.rules.late and session.fresh:
            self.fire(session, "late")

    def owed(self, session):
        """When the first row that a session must take back would be late itself."""
        if self.in_parts or not session.emitted:
            return NEVER
        if (
            all(self.same(emitted, session) for emitted in session.emitted)
            and len(session.emitted) == 1
        ):
            return NEVER
        inclusive = int(self.rules.inclusive)
        return min(emitted.end for emitted in session.emitted) + self.rules.lateness + inclusive

    def same(self, emitted, session):
        whole = self.rules.mode == "retract" or self.rules.apart_by_end
        return emitted.start == session.start and (emitted.end == session.end or not whole)

    # ── panes ───────────────────────────────────────────────────────────────────────────────

    @property
    def in_parts(self):
        return self.rules.mode == "discard" or self.rules.once

    def fire(self, session, kind):
        said = session.fresh if self.in_parts else session.values
        values = (len(said), sum(said), session.overlaps)
        fresh, session.fresh = session.fresh, []
        if self.in_parts:
            if fresh:
                self.tell(1, session, values, kind)
                session.panes += 1
            return
        now = EmittedPane(session.start, session.end, (*values, kind, session.panes))
        before = session.emitted
        unchanged = len(before) == 1 and (before[0].start, before[0].end, before[0].values[:3]) == (
            now.start,
            now.end,
            values,
        )
        if unchanged:
            return
        for emitted in before:
            replaced = emitted.start == now.start and (
                emitted.end == now.end or not self.rules.apart_by_end
            )
            if self.rules.mode == "retract" or not replaced:
                self.rows[(-1, emitted.start, emitted.end, *emitted.values)] += 1
        self.tell(1, session, values, kind)
        session.emitted = [now]
        session.panes += 1

    def tell(self, diff, session, values, kind):
        self.rows[(diff, session.start, session.end, *values, kind, session.panes)] += 1

    @property
    def answers(self):
        return sorted(
            (start, end, len(values), sum(values), overlaps)
            for start, end, _, overlaps, values in self.closed
        )


def run(events, rules):
    """Run events ``(key, ts, gap, value, reached)`` in their order, to the end of time; by key."""
    found = {}
    for key, ts, gap, value, reached in sorted(events, key=lambda event: event[4]):
        found.setdefault(key, Sessions(rules)).take(ts, gap, value, reached)
    for sessions in found.values():
        sessions.pass_time(NEVER)
    return found
