"""The pictures of the documentation are those that their program draws, and can be read as XML."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest

PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"


@pytest.fixture(scope="module")
def drawing() -> ModuleType:
    spec = importlib.util.spec_from_file_location("draw_joins", PICTURES / "draw_joins.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["draw_joins"] = module  # where a dataclass looks for its module
    spec.loader.exec_module(module)
    return module


def test_the_pictures_of_joins_are_as_they_are_drawn(drawing: ModuleType) -> None:
    for name, draw in drawing.PICTURES.items():
        svg = draw().svg()
        assert (PICTURES / f"{name}.svg").read_text(encoding="utf-8") == svg
        assert ET.fromstring(svg).tag.endswith("svg")


def test_each_picture_is_in_the_page_of_joins(drawing: ModuleType) -> None:
    page = (PICTURES.parent / "joins.md").read_text(encoding="utf-8")
    for name in drawing.PICTURES:
        assert f"](pictures/{name}.svg)" in page
