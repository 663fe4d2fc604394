"""Cases G, and D1: deduplication within ten minutes, exact and by filters."""

from cases.case import Answer, Case, event

import millstream as ms

FILTERS = {"fpr": 1e-9, "rotate": "1 minute", "expect": 1000}
STORES = {
    "exact": None,
    "bloom": ms.bloom(**FILTERS),
    "checked": ms.bloom(**FILTERS, exact_check=True),
}


def minutes(*arrivals):
    """Events numbered as they come: ``(id, minute)``."""
    return [event(at * 60, number, id=name) for number, (name, at) in enumerate(arrivals)]


def kept(*case, **options):
    """Return what makes a case for the stores that it is given."""
    return lambda stores: _case(stores, *case, **options)


def _case(
    stores, case_id, says, rows, numbers, *, ids="id", null="pass", exact_only=False, **options
):
    """A case that says which events are kept; ``exact_only``: where the exact horizon matters."""
    stores = {name: STORES[name] for name in stores if name != "bloom" or not exact_only}

    def build(stream, name):
        return {
            store: stream.dedup(
                ids, within="10 minutes", null=null, bloom=bloom, name=f"{name}/{store}"
            )
            for store, bloom in stores.items()
        }

    counts = {name: len(stores) * options.pop(name, 0) for name in ("late", "duplicate")}
    answers = {store: Answer("n", [(n,) for n in numbers], "changelog") for store in stores}
    return Case(case_id, says, rows, build, answers, **counts, **options)


PARTS = [("a", 1), ("a", 2), ("a", 1), ("a", None), ("a", None), (None, 1)]


KEPT = [
    kept("G1", "an id passes again beyond the horizon", minutes(("a", 0), ("a", 30)), [0, 1]),
    kept(
        "G1",
        "with an event between or without",
        minutes(("a", 0), ("z", 30), ("a", 30)),
        [0, 1, 2],
    ),
    kept("G2", "the horizon is inclusive", minutes(("a", 0), ("a", 10)), [0], duplicate=1),
    kept(
        "G2",
        "a microsecond beyond it is outside",
        [event(0, 0, id="a"), event(600.000001, 1, id="a")],
        [0, 1],
        exact_only=True,
    ),
    kept(
        "G3",
        "a late repeat is late and never a second emission",
        minutes(("a", 0), ("z", 21), ("a", 2)),
        [0, 1],
        late=1,
    ),
    kept(
        "G4",
        "events without an id are like no other",
        minutes((None, 0), (None, 0), ("a", 0), (None, 1), ("a", 1)),
        [0, 1, 2, 3],
        duplicate=1,
    ),
    kept(
        "G4",
        "events without an id are left out where that is asked for",
        minutes((None, 0), ("a", 0), (None, 1), ("a", 1)),
        [1],
        duplicate=1,
        null="drop",
    ),
    kept(
        "G5",
        "of repeats the first in the log stays",
        [event(0, number, id="a") for number in (7, 3, 9)],
        [7],
        duplicate=2,
    ),
    kept(
        "D1",
        "at the watermark is in time and below it is late",
        minutes(("a", 10), ("b", 10), ("c", 10), ("d", 9), ("e", 11)),
        [0, 1, 2, 4],
        late=1,
    ),
    kept(
        "G",
        "a chain is judged by what was kept",
        minutes(("a", 0), ("a", 8), ("a", 16), ("a", 24), ("a", 32)),
        [0, 2, 4],
        duplicate=2,
        exact_only=True,
    ),
    kept(
        "G",
        "a repeat may be earlier than what was kept",
        minutes(("a", 30), ("a", 22), ("a", 5)),
        [0, 2],
        duplicate=1,
        delay=3600,
    ),
    kept(
        "G",
        "lateness lets events in",
        minutes(("a", 0), ("z", 40), ("a", 11), ("a", 10), ("a", 9)),
        [0, 1, 2],
        late=1,
        duplicate=1,
        lateness=30 * 60,
        exact_only=True,
    ),
    kept(
        "G",
        "lateness holds ids for longer",
        minutes(("a", 0), ("z", 40), ("a", 9), ("a", 0)),
        [0, 1],
        duplicate=2,
        lateness=40 * 60,
    ),
    kept(
        "G",
        "an id of several columns is none when one is missing",
        [event(0, n, id=one, part=two) for n, (one, two) in enumerate(PARTS)],
        [0, 1, 3, 4, 5],
        duplicate=1,
        ids=["id", "part"],
    ),
]


def cases_of(*stores):
    """The cases, with stores of these names."""
    return [case(stores) for case in KEPT]


CASES = cases_of(*STORES)
CHECKED = cases_of("exact", "checked")  # whose answers do not go by hashes alone
