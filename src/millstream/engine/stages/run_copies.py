"""Copies runs of state from one place to another: between an app's folder and an object store.

A run never changes, so a copy may be made while another process reads it. Its bytes, and so its size and checksum, are those
that the other place gives it; a run that several manifests share is copied once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from millstream.engine.stages.run_files import RunFiles
from millstream.kernels.state.sorted_runs import Run

Entry = Sequence[Any]
"""A run as a manifest names it: :meth:`Run.to_message`."""

_SYNC_BYTES = 64 << 20  # bounds the memory of runs that wait to be written together


def copy_runs(
    manifests: Iterable[bytes], source: RunFiles, target: RunFiles
) -> Callable[[Entry], list[Any]]:
    """Copy all runs that some manifests name, durably; return what they are called in the target.

    Raises:
        CorruptionError: a run is missing, incomplete, or another.
        ObjectStoreUnavailableError: a place does not answer.
    """
    copied: dict[str, Run] = {}
    waiting_bytes = 0
    for run in _runs(manifests):
        if run.name in copied:
            continue
        copied[run.name] = target.save(run.slot, source.load(run))
        waiting_bytes += run.size_bytes
        if waiting_bytes >= _SYNC_BYTES:
            target.sync()
            waiting_bytes = 0
    target.sync()

    def moved(entry: Entry) -> list[Any]:
        made = copied[entry[0]]
        slot, rows, _, *rest = entry[1:]
        return [made.name, slot, rows, made.size_bytes, *rest]

    return moved


def _runs(manifests: Iterable[bytes]) -> Iterable[Run]:
    for manifest in manifests:
        for message in json.loads(manifest).values():
            for entries in message["runs"].values():
                yield from map(Run.from_message, entries)
