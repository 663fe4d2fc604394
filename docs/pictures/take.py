"""Take the picture of the page anew, while a demo runs or after it.

In one terminal, and some two minutes later in another:

    millstream demo ads --input generated --rate 100 --minutes 180 --speed 60 --fresh --stay
    python docs/pictures/take.py

It needs Playwright for Python and a Chromium that is installed, as the tests of the page do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from playwright.sync_api import sync_playwright

TARGET = Path(__file__).parent / "page.png"
WIDTH, HEIGHT = 1200, 1000
PANELS = 6  # that the demo declares
WATCHED_MS = 20_000  # for a few batches, which its smallest line is drawn of


def take(url: str, target: Path) -> None:
    """Write what the top of the page shows, in light colours, once all panels are drawn."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        sys.exit("There is no Chromium here. Install the package chromium.")
    # As root it runs without its sandbox, or not at all; it sees nothing but our own page.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=arguments)
        page = chromium.new_page(viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light")
        page.goto(url)
        page.wait_for_function(
            "count => document.querySelectorAll('[data-panel]').length === count", arg=PANELS
        )
        page.wait_for_selector("[data-panel] path.line")
        page.wait_for_timeout(WATCHED_MS)
        page.screenshot(path=target)
        chromium.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Take the picture of the demo's page.")
    parser.add_argument("--url", default="http://127.0.0.1:8400/", help="where the page is")
    parser.add_argument("--target", type=Path, default=TARGET, help="the file to write")
    given = parser.parse_args()
    take(given.url, given.target)
    print(f"{given.target}: {given.target.stat().st_size:,} bytes")
