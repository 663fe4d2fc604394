"""State that released formats have left is read, planned on, gone on with, and deployed onto."""

from __future__ import annotations

import json
import tarfile
from datetime import datetime
from pathlib import Path

import pytest
from edited_app import EditedApp, texts_of

from millstream.ops.deploy import deploy
from millstream.ops.plan import plan_change
from millstream.views.state_store.program import STATE_FORMAT

FOLDER = Path(__file__).resolve().parents[2] / "state_formats"
FORMATS = sorted(FOLDER.glob("*.tar.gz"))
FACTOR = ("FACTOR = 2", "FACTOR = 3")


@pytest.fixture(params=FORMATS, ids=lambda path: path.name)
def kept(request, tmp_path):
    """An app as an earlier version has left it."""
    with tarfile.open(request.param) as files:
        files.extractall(tmp_path, filter="data")
    return EditedApp(tmp_path, 4, 60, (tmp_path / "app.py").read_text(), by_ad=True)


def more_of(kept):
    rows = json.loads((kept.folder / "more.json").read_text())
    return [{**row, "at": datetime.fromisoformat(row["at"])} for row in rows]


def test_the_present_format_is_among_those_that_are_kept():
    names = [path.name for path in FORMATS]
    assert f"{STATE_FORMAT}.tar.gz" in names, "run python tests/state_formats/make.py"


def test_an_app_goes_on_with_the_state_of_an_earlier_version(kept):
    app = kept.write()
    assert plan_change(app, same_expressions=True).verdict == "keeps"
    more = more_of(kept)
    kept.append(more)
    assert sum(batch.read for batch in kept.run(app, same_expressions=True)) == len(more)
    assert texts_of(kept.views(app)) == json.loads((kept.folder / "expected.json").read_text())


def test_an_edit_is_deployed_onto_the_state_of_an_earlier_version(kept):
    app = kept.write(FACTOR)
    plan = plan_change(app, same_expressions=True)
    rebuilt = {part.name for part in plan.change.parts if part.verdict == "rebuilds"}
    assert rebuilt == {"per_kind"}
    assert deploy(app, same_expressions=True).records == plan.records
    kept.append(more_of(kept))
    kept.run(app, same_expressions=True)
    expected = json.loads((kept.folder / "expected.json").read_text())
    found = texts_of(kept.views(app))
    assert {name for name in expected if found[name] != expected[name]} == {"per_kind"}
