"""The built site in a real browser: search without a server, narrow and wide, and nothing from another host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long  # the whole site is built; `make check` checks its pages
ROOT = Path(__file__).resolve().parents[3]
WAIT_MS = 60_000
PAGES = ("docs/index", "docs/guide/tutorial", "docs/guide/time", "docs/joins", "docs/reference/app")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("sphinx", reason="Sphinx is not installed")
    folder = tmp_path_factory.mktemp("site")  # of this process: another may build at the same time
    command = [sys.executable, "tools/build_docs.py", "--unpacked", "--build", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


@pytest.fixture
def opened(site, chromium):
    """Return a function that opens a page of the folder; nothing may fail in it, and nothing come from afar."""
    faults, contexts = [], []

    def open_page(name, width=1280, scheme="light"):
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme
        )
        context.set_default_timeout(WAIT_MS)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("requestfailed", lambda request: faults.append(request.url))
        page.on(
            "request",
            lambda request: (
                faults.append(request.url)
                if not request.url.startswith((site.as_uri(), "data:"))
                else None
            ),
        )
        page.goto(f"{site.as_uri()}/{name}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def test_the_search_needs_no_server(site, chromium):
    page = (
        chromium.new_page()
    )  # without a server, the extracts of pages cannot be fetched: they are missing
    page.goto(f"{site.as_uri()}/search.html?q=watermark")
    page.wait_for_selector("#search-results ul.search li", timeout=WAIT_MS)
    found = page.locator("#search-results li a").all_inner_texts()
    assert "Time, windows and late events" in found
    assert not [title for title in found if title.startswith("00")]  # no decisions


def test_the_first_address_leads_to_the_first_page(opened):
    page = opened("index.html")
    page.wait_for_url("**/docs/index.html")
    assert page.locator("h1").first.inner_text().startswith("Millstream")


@pytest.mark.parametrize("width", [360, 1280])
@pytest.mark.parametrize("name", PAGES)
def test_no_page_is_wider_than_the_screen(opened, name, width):
    page = opened(f"{name}.html", width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    broken = "[...document.images].filter(i => i.complete && !i.naturalWidth).map(i => i.src)"
    assert page.evaluate(broken) == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_from_its_ground(opened, scheme):
    page = opened("docs/guide/time.html", scheme=scheme)
    ground, ink = page.evaluate(
        """() => {
            const numbers = (color) => color.match(/[\\d.]+/g).slice(0, 3).map(Number);
            const body = getComputedStyle(document.body);
            return [numbers(body.backgroundColor), numbers(body.color)];
        }"""
    )
    darker, lighter = sorted((luminance(ground), luminance(ink)))
    assert (lighter + 0.05) / (darker + 0.05) >= 7  # WCAG 2, level AAA
    assert (luminance(ground) < luminance(ink)) == (scheme == "dark")


def luminance(color):
    """The relative luminance of WCAG 2."""
    linear = [
        part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4
        for part in (each / 255 for each in color)
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
