"""The naive model of process functions: a dict for each key, one row or timer after the other.

Written from the rule in docs/process.md. The function that is run interprets its rows: each says in its column ``do``
what is to be done, so random rows are random functions.
"""

from copy import deepcopy
from datetime import UTC, datetime, timedelta

import polars as pl

import millstream as ms

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
TTL_S = 7
OUTPUT = {"k": pl.String, "what": pl.String, "state": pl.String}
SIDE = {"k": pl.String, "n": pl.Int64}
WORDS = (
    "add", "append", "pop", "insert", "put", "remove", "forget", "remember",
    "timer", "delete", "emit", "side", "fail", "wrong", "nothing",
)  # fmt: skip


def at(seconds):
    return EPOCH + timedelta(seconds=seconds)


def seconds(time):
    return int((time - EPOCH).total_seconds())


class Interpreter(ms.ProcessFunction):
    """Does what its rows say."""

    total = ms.value_state(pl.Int64, default=0)
    items = ms.list_state(pl.Int64)
    places = ms.map_state(pl.Int64, pl.String)
    short = ms.value_state(pl.Int64, ttl=f"{TTL_S} seconds")

    def on_row(self, context, row):
        for word in row["do"].split():
            self.do(context, word, row["n"])

    def do(self, context, word, n):  # noqa: C901 - a branch for each word
        state = context.state
        if word == "add":
            state.total += n
        elif word == "append":
            state.items.append(n)
        elif word == "pop" and state.items:
            state.items.pop(0)
        elif word == "insert":
            state.items.insert(0, n)
        elif word == "put":
            state.places[n] = f"at {n}"
        elif word == "remove":
            state.places.pop(n, None)
        elif word == "forget":
            state.total, state.items, state.places, state.short = None, [], {}, None
        elif word == "remember":
            state.short = n
        elif word == "timer":
            context.set_timer(context.time + timedelta(seconds=n))
        elif word == "delete":
            for time in context.timers[:1]:
                context.delete_timer(time)
        elif word == "emit":
            self.emit(context, "row")
        elif word == "side":
            context.emit({"k": context.key["k"], "n": n}, to="side")
        elif word == "fail":
            raise ValueError("the row says so")
        elif word == "wrong":
            state.total = "text"

    def on_timer(self, context, time):
        self.emit(context, f"timer of {seconds(time)}")
        context.state.items.append(seconds(time))
        if context.state.total % 5 == 1:
            context.state.total += 1
            context.set_timer(time + timedelta(seconds=2))
        if context.state.total % 5 == 2:
            context.state.total += 1
            context.set_timer(time)
        if context.state.total % 5 == 4:
            raise ValueError("the total says so")

    def emit(self, context, what):
        state = context.state
        held = f"{state.total} {[*state.items]} {dict(state.places)} {state.short}"
        what = f"{what} at {seconds(context.time)}, {[*map(seconds, context.timers)]}"
        context.emit({"k": context.key["k"], "what": what, "state": held})


def model(rows, until):
    """Return what is emitted, to the side, and how many calls fail, of the rows of one key; timers come before ``until``.

    ``rows`` are (time, do, n) in the order of time, those of one time in that of the log.
    """
    made, side, failed = [], [], 0
    held = {"total": 0, "items": [], "places": {}, "short": None, "timers": set()}
    now, coming = 0, [*rows]
    while True:
        timer = min(held["timers"], default=None)
        if timer is not None and (timer <= coming[0][0] if coming else timer <= until):
            held["timers"].remove(timer)
            now = max(now, timer)
            call = ("timer", timer, None)
        elif coming:
            now, do, n = coming.pop(0)
            call = ("row", do, n)
        else:
            return made, side, failed
        after, output, other = deepcopy(held), [], []
        if _call(after, call, now, output, other):
            held, made, side = after, made + output, side + other
        else:
            failed += 1


def _call(held, call, now, output, other):  # noqa: C901 - a branch for each word
    """Change what is held, as one call does; return whether it went well."""
    if held["short"] is not None and now > held["short"][1] + TTL_S:
        held["short"] = None
    kind, given, n = call
    if kind == "timer":
        output.append(_shown(held, f"timer of {given}", now))
        held["items"].append(given)
        if held["total"] % 5 == 1:
            held["total"] += 1
            held["timers"].add(given + 2)
        if held["total"] % 5 == 2:
            held["total"] += 1
            held["timers"].add(given)
        return held["total"] % 5 != 4
    for word in given.split():
        if word == "add":
            held["total"] += n
        elif word == "append":
            held["items"].append(n)
        elif word == "pop":
            held["items"] = held["items"][1:]
        elif word == "insert":
            held["items"] = [n, *held["items"]]
        elif word == "put":
            held["places"][n] = f"at {n}"
        elif word == "remove":
            held["places"].pop(n, None)
        elif word == "forget":
            held["total"], held["items"], held["places"], held["short"] = 0, [], {}, None
        elif word == "remember":
            held["short"] = (n, now)
        elif word == "timer":
            held["timers"].add(now + n)
        elif word == "delete":
            held["timers"] -= {min(held["timers"], default=None)}
        elif word == "emit":
            output.append(_shown(held, "row", now))
        elif word == "side":
            other.append(n)
        elif word in ("fail", "wrong"):
            return False
    return True


def _shown(held, what, now):
    short = None if held["short"] is None else held["short"][0]
    return (
        f"{what} at {now}, {sorted(held['timers'])}",
        f"{held['total']} {held['items']} {held['places']} {short}",
    )
