"""deploy/kubernetes as a user makes it theirs: a copy with another image and addresses, and the two secrets."""

from __future__ import annotations

import shutil
from pathlib import Path

import image as images

MANIFESTS = Path(__file__).resolve().parents[2] / "deploy/kubernetes"
NAMESPACE = "streams"


def own_copy(folder: Path, changes: dict[str, dict[str, str]]) -> Path:
    """Copy the manifests, with changes: for each file, texts and what takes their place."""
    copy = folder / "deploy"
    shutil.copytree(MANIFESTS, copy)
    for name, texts in changes.items():
        content = (copy / name).read_text()
        for before, after in texts.items():
            assert before in content, f"{name} has no {before!r}"
            content = content.replace(before, after)
        (copy / name).write_text(content)
    return copy


assert images.IMAGE.rpartition(":")[0] in (MANIFESTS / "kustomization.yaml").read_text()
