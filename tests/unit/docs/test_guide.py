"""Each page of the guide does what it says, from its first block to its last."""

from __future__ import annotations

from pathlib import Path

import pytest
from guide_page import Block, blocks_of, is_as_shown, lines_of, perform

GUIDE = Path(__file__).resolve().parents[3] / "docs" / "guide"
PAGES = sorted(GUIDE.glob("*.md"))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_does_what_it_shows(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MILLSTREAM_ENGINE", "local")  # a page that exports it leaves nothing behind
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--millstream-batchings=4")  # of 20, to save time
    monkeypatch.delenv("MILLSTREAM_LOG", raising=False)
    for block in blocks_of(path.read_text()):
        printed = perform(block, tmp_path)
        if block.shown is not None and printed is not None:
            assert is_as_shown(printed, block.shown), f"{path.name}:{block.line}:\n{printed}"


def test_every_block_of_the_guide_is_run_or_says_why_not():
    for path in PAGES:
        for block in blocks_of(path.read_text()):
            runs = block.is_run or block.file_name is not None
            assert runs or block.note.startswith("not run: "), f"{path.name}:{block.line}"


def test_what_is_shown_is_compared():
    assert is_as_shown("took 3 s\nx \n", "took … s\nx\n")
    assert not is_as_shown("took 3 s\ny\n", "took … s\nx\n")
    assert not is_as_shown("more\nx\n", "x\n")


def test_a_page_is_divided_into_blocks():
    page = "a\n\n```python\n# one.py\nx\n```\n\n```text\n1\n```\n\n<!-- file: b.json -->\n```json\n{}\n```\n"
    first, second = blocks_of(page)
    assert (first.file_name, first.is_run, first.shown) == ("one.py", True, "1\n")
    assert (second.file_name, second.is_run) == ("b.json", False)


def test_a_block_is_left_out_where_the_page_says_why():
    block = Block(1, "sh", "exit 1\n", "not run: it would end the shell", None, (0, 0))
    assert perform(block, Path()) is None


def test_a_script_is_divided_into_lines():
    assert lines_of("a # first\n# second\nb \\\n  c\n") == ["a", "b    c"]
