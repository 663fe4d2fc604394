"""Take the picture of the page anew: of the live part of the demo, which this program runs, or of a page that is there.

    python docs/pictures/take.py
    python docs/pictures/take.py --url http://127.0.0.1:8400/ --dark --width 390 --target /tmp/narrow.png

It needs Playwright for Python and a Chromium that is installed, as the tests of the page do.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import sync_playwright

TARGET = Path(__file__).parent / "page.png"
WIDTH, HEIGHT = 1200, 1000
PANELS = 8  # that the live part declares
BYTES_MAX = 300_000
WATCHED_S = 75  # a bot has come, and the pipeline was killed and goes on
RUNS_S = 600
DEMO = """
import sys
from pathlib import Path
from rich.console import Console
from millstream.demo.live_run import LiveOptions, run_live
run_live(LiveOptions(Path(sys.argv[1]), "127.0.0.1:0", sys.argv[2], float(sys.argv[3])), Console(width=200))
"""


@contextmanager
def live_part(engine: str) -> Iterator[str]:
    """Run the live part of the demo in a temporary folder until the block ends; yield the page's address."""
    with tempfile.TemporaryDirectory(prefix="millstream-picture-") as folder:
        command = [sys.executable, "-c", DEMO, folder, engine, str(RUNS_S)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:  # noqa: S603 - our own
            assert running.stdout is not None
            try:
                said = next(line for line in running.stdout if line.startswith("The page: "))
                yield said.split()[-1]
            finally:
                running.send_signal(
                    signal.SIGINT
                )  # it ends with its comparison, and leaves nothing behind
                running.communicate()


def take(url: str, target: Path, width: int, seconds: float, *, dark: bool) -> None:
    """Write what the top of the page shows, once all panels are drawn and some seconds have passed."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next(filter(None, map(shutil.which, names)), None)
    if browser is None:
        sys.exit("There is no Chromium here. Install the package chromium.")
    # As root it runs without its sandbox, or not at all; it sees nothing but our own page.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=browser, args=arguments)
        page = chromium.new_page(
            viewport={"width": width, "height": HEIGHT}, color_scheme="dark" if dark else "light"
        )
        page.set_default_timeout(120_000)
        page.goto(url)
        page.wait_for_function(
            "count => document.querySelectorAll('[data-panel]').length === count", arg=PANELS
        )
        page.wait_for_selector("[data-panel] path.line")
        page.wait_for_timeout(seconds * 1000)
        page.screenshot(path=target)
        chromium.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Take the picture of the demo's page.")
    parser.add_argument("--url", help="where a page is; by default the live part is run for it")
    parser.add_argument("--engine", default="local", help="what runs the pipeline")
    parser.add_argument("--target", type=Path, default=TARGET, help="the file to write")
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--seconds", type=float, help="how long to watch before")
    given = parser.parse_args()
    if given.url:
        take(given.url, given.target, given.width, given.seconds or 5, dark=given.dark)
    else:
        with live_part(given.engine) as url:
            take(url, given.target, given.width, given.seconds or WATCHED_S, dark=given.dark)
    size = given.target.stat().st_size
    print(f"{given.target}: {size:,} bytes")
    sys.exit(f"It is larger than {BYTES_MAX:,} bytes." if size > BYTES_MAX else 0)
