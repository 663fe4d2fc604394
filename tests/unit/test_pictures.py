"""The pictures of the documentation are those that their programs draw, and can be read as XML."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PICTURES = DOCS / "pictures"
# Each program, with the pages that have its pictures.
PAGES = {
    "draw_joins": ("joins.md",),
    "draw_time": ("guide/time.md", "guide/effectively-once.md"),
}


@pytest.fixture(params=sorted(PAGES))
def drawing(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(PICTURES))  # where the programs find what they draw on
    spec = importlib.util.spec_from_file_location(request.param, PICTURES / f"{request.param}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, request.param, module)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_as_they_are_drawn(drawing: ModuleType) -> None:
    for name, draw in drawing.PICTURES.items():
        svg = draw().svg()
        assert (PICTURES / f"{name}.svg").read_text(encoding="utf-8") == svg
        assert ET.fromstring(svg).tag.endswith("svg")


def test_each_picture_is_in_a_page(drawing: ModuleType) -> None:
    pages = [(DOCS / page).read_text(encoding="utf-8") for page in PAGES[drawing.__name__]]
    for name in drawing.PICTURES:
        assert any(f"pictures/{name}.svg)" in page for page in pages), name
