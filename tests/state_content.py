"""What state holds, whatever its runs are called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millstream.engine.stages.run_files import RunFiles
from millstream.kernels.state.sorted_runs import Run
from millstream.object_store.folder import FolderStore
from millstream.views.schema import JOB
from millstream.views.store_location import open_state_store


def state_content(store: Path, app: str, runs: Path) -> dict[Any, Any]:
    """Return the manifests in a state store, with the rows of each run of a folder in the place of its name."""
    files = RunFiles(FolderStore(runs), 999)

    def plain(message: Mapping[str, Any]) -> dict[str, Any]:
        found = {
            family: [[files.load(Run(*entry)).to_pylist(), *entry[1:]] for entry in entries]
            for family, entries in message["runs"].items()
        }
        return {**message, "runs": found}

    with open_state_store(store, readonly=True) as opened:
        manifests = opened.state_manifests(app, JOB)
    return {
        place: {key: plain(one) for key, one in json.loads(manifest).items()}
        for place, manifest in manifests.items()
    }
