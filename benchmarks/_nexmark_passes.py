"""What the engines of the Nexmark benchmark share: passes over queries in one process, measured."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from _measure import tree_cpu_s


@dataclass(frozen=True)
class Spec:
    """What an engine's process is to do.

    ``log`` is the folder of the log in ``folder``. Each of ``passes`` is a query, run over the whole input, and whether its results are to be kept,
    in ``out``. Else they are thrown away, or go into a view, if the query is not in ``discard``.
    ``records`` is how many bids there are, to be read in so many ``batches``.
    """

    folder: Path
    log: str
    out: Path
    passes: list[tuple[str, bool]]
    batches: int
    records: int
    discard: list[str]

    @staticmethod
    def read() -> Spec:
        given = json.loads(sys.argv[1])
        folder, out = Path(given.pop("folder")), Path(given.pop("out"))
        return Spec(folder=folder, out=out, **given)

    def to_argument(self) -> str:
        return json.dumps({**vars(self), "folder": str(self.folder), "out": str(self.out)})


def run_passes(spec: Spec, run: Callable[[str, int, bool], None]) -> None:
    """Run ``run(query, number, kept)`` for each pass and measure; print one line of JSON.

    The first pass also has the engine's start.
    """
    passes = []
    wall, cpu = time.monotonic(), 0.0
    for number, (query, kept) in enumerate(spec.passes):
        run(query, number, kept)
        now, used = time.monotonic(), tree_cpu_s()
        passes.append({"query": query, "kept": kept, "wall_s": now - wall, "cpu_s": used - cpu})
        wall, cpu = now, used
    print(json.dumps(passes))
