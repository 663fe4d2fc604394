"""The site has every page and every public name, and the list for language models says what each page is."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

import millstream
from millstream.cli.main import COMMANDS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def site_pages():
    spec = importlib.util.spec_from_file_location("site_pages", ROOT / "docs" / "site_pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pages_of(site_pages):
    return [page for pages in site_pages.NAVIGATION.values() for page in pages]


def test_every_page_is_in_the_navigation_once(site_pages):
    pages = pages_of(site_pages)
    there = [
        path.relative_to(ROOT).with_suffix("").as_posix()
        for path in [
            *ROOT.glob("*.md"),
            *(ROOT / "benchmarks").glob("*.md"),
            *(ROOT / "docs").rglob("*.md"),
        ]
        if path.parent.name != "decisions"  # these are found from their list
    ]
    assert sorted(pages) == sorted({*there, "docs/decisions/README"} - {site_pages.HOME})


def test_every_extra_is_in_the_list_of_the_installation():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    table = (ROOT / "docs/guide/install.md").read_text().split("| Extra | For |")[1]
    first = "".join(line.split("|")[1] for line in table.splitlines() if line.startswith("| "))
    assert sorted(re.findall(r"`(\w+)`", first)) == sorted(project["optional-dependencies"])


def test_every_public_name_has_one_entry(site_pages):
    named = [name for names in site_pages.PUBLIC_NAMES.values() for name in names.split()]
    assert sorted(named) == sorted({*millstream.__all__} - {"__version__"})
    for page in site_pages.PUBLIC_NAMES:
        for name in site_pages.names_on(page):
            assert "auto" in site_pages.entry(name)


def test_every_command_and_each_below_it_has_an_entry(site_pages):
    text = "\n".join(site_pages.command_entries())
    for name in COMMANDS:
        assert f"\n## millstream {name}\n" in text
    assert "\n### millstream topic create\n" in text
    assert "| `-h, --help` |" in text


def test_the_list_for_language_models_has_each_page_with_its_sentence(site_pages):
    pages = pages_of(site_pages)
    text = site_pages.list_for_models({page: f"title of {page}" for page in pages})
    assert text.startswith("# Millstream\n\n> Millstream is a Python library and a command. It")
    for page in pages:
        (line,) = [line for line in text.splitlines() if f"]({page}.md)" in line]
        assert line.startswith(f"- [title of {page}]")
        assert not line.endswith(": "), page


def test_a_summary_is_a_sentence_without_links(site_pages):
    page = "# Title\n\n> said\n\n*motto*\n\n```sh\nx\n\ny\n```\n\nA [link](x.md) to `a.b`. More. And more.\n"
    assert site_pages.summary(page) == "A link to `a.b`."


def test_a_guarantee_is_one_paragraph_and_a_property_has_no_type_of_its_text(site_pages):
    lines = ["Guarantees: each", "    once.", "", "    code"]
    site_pages.straighten(None, "method", "", None, None, lines)
    assert lines == ["**Guarantees:** each", "once.", "", "    code"]
    lines = ["one without ends.", "", ":type: The spans"]
    site_pages.straighten(None, "property", "", None, None, lines)
    assert lines == ["The spans: one without ends.", ""]
