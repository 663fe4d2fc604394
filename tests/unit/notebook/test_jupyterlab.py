"""The example in a real JupyterLab, in a browser: what it shows, that it is updated in place, light and dark."""

import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

pytestmark = pytest.mark.thorough

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "clicks.ipynb"
PATIENCE_S = 240
PATIENCE_MS = PATIENCE_S * 1000
TOKEN = "of-this-test"


def write_settings(folder, name, text):
    path = folder / "@jupyterlab" / "apputils-extension" / f"{name}.jupyterlab-settings"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@contextmanager
def jupyterlab(folder, theme):
    """Serve a folder; yield the address. All that it keeps is in a folder beside."""
    pytest.importorskip("jupyterlab", reason="no JupyterLab")
    own = folder.parent / f"{folder.name}-jupyter"
    names = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    places = {name: str(own / name.lower()) for name in names}
    settings = own / "settings"
    write_settings(settings, "themes", f'{{"theme": "{theme}"}}')
    write_settings(settings, "notification", '{"fetchNews": "false", "checkForUpdates": false}')
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with (folder.parent / f"{folder.name}.log").open("w") as log:
        server = subprocess.Popen(
            [
                *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"),
                *("--ip=127.0.0.1", f"--port={port}", "--ServerApp.port_retries=0"),
                *(f"--IdentityProvider.token={TOKEN}", f"--ServerApp.root_dir={folder}"),
            ],
            env={
                **os.environ,
                **places,
                "JUPYTERLAB_SETTINGS_DIR": str(settings),
                "JUPYTERLAB_WORKSPACES_DIR": str(own / "workspaces"),
            },
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        address = f"http://127.0.0.1:{port}"
        wait_for(f"{address}/api?token={TOKEN}", server)
        yield address
    finally:
        server.terminate()
        server.wait(PATIENCE_S)


def wait_for(url, server):
    ends = time.monotonic() + PATIENCE_S
    while True:
        try:
            urllib.request.urlopen(url).close()
        except (urllib.error.URLError, OSError):
            assert server.poll() is None, "JupyterLab has ended"
            assert time.monotonic() < ends, "JupyterLab does not answer"
            time.sleep(0.1)
        else:
            return


@pytest.mark.parametrize("theme", ["JupyterLab Light", "JupyterLab Dark"])
def test_the_example_shows_and_follows_what_the_app_does(tmp_path, chromium, theme):
    folder = tmp_path / "notebooks"
    folder.mkdir()
    shutil.copy(EXAMPLE, folder)
    with jupyterlab(folder, theme) as address:
        page = chromium.new_page(viewport={"width": 1100, "height": 3300})
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{address}/lab/tree/{EXAMPLE.name}?token={TOKEN}&reset")
        cells = page.locator(".jp-Notebook .jp-CodeCell")
        cells.last.wait_for()
        page.get_by_text(re.compile(r"Python 3 .*\| Idle")).wait_for()

        def run(number):
            cells.nth(number).locator(".cm-content").click()
            page.keyboard.press("Control+Enter")

        def output(number):
            return cells.nth(number).locator(".jp-OutputArea-output").first

        for number in range(9):  # all but the SQL, and the stop
            run(number)
            page.get_by_text(re.compile(rf"^\[{number + 1}\]:$")).first.wait_for()
        output(4).locator("svg").wait_for()
        output(7).get_by_text("36 rows").wait_for()
        plot = output(8).locator("canvas, svg").first
        plot.wait_for()
        before = plot.screenshot()
        # One more hour: the line, the table and the plot that are there show it, without their cells being run.
        run(6)
        output(5).get_by_text("2,160").wait_for()
        output(7).get_by_text("54 rows").wait_for()
        ends = time.monotonic() + PATIENCE_S
        while output(8).locator("canvas, svg").first.screenshot() == before:
            assert time.monotonic() < ends, "the plot stays as it was"
            page.wait_for_timeout(200)
        run(10)
        output(5).get_by_text("clicks stopped").wait_for()
        assert page.locator('[data-mime-type="application/vnd.jupyter.stderr"]').count() == 0
        assert page.locator('[data-mime-type="application/vnd.jupyter.error"]').count() == 0
        page.screenshot(path=tmp_path / "jupyterlab.png")
        page.close()
