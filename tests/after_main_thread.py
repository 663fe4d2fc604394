"""Programs whose main thread ends before their work: other threads of theirs go on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent, indent

ROOT = Path(__file__).parents[1]
_PROGRAM = """
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

def main_thread_has_ended():
    with ThreadPoolExecutor(1) as pool:
        while True:
            try:
                pool.submit(int).result()
            except RuntimeError:
                return

def work():
    main_thread_has_ended()
{body}
    print("done", flush=True)

threading.Thread(target=work).start()
"""


def run_after_the_main_thread(body: str, *arguments: object) -> str:
    """Run a program's ``body`` in a thread that outlives the main one; return what it printed."""
    ended = subprocess.run(
        [
            sys.executable,
            "-c",
            _PROGRAM.format(body=indent(dedent(body), "    ")),
            *map(str, arguments),
        ],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stderr
    assert ended.stdout.endswith("done\n")
    return ended.stdout
