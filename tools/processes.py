"""Programs that are run to their end, one after another or two at once, and their exit codes."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO


def say(text: str) -> None:
    """Print one line of progress, apart from the output of the programs."""
    print(text, file=sys.stderr, flush=True)


def run(
    command: Sequence[str],
    env: Mapping[str, str] | None = None,
    output: IO[str] | None = None,
) -> int:
    """Run a program to its end and return its exit code.

    Ctrl-C reaches the program too; how to end is its decision, so it is waited for.

    Args:
        env: Its variables; by default those of this program.
        output: A file for what it prints; by default it is shown.

    """
    said = None if output is None else subprocess.STDOUT
    process = subprocess.Popen(command, env=env, stdout=output, stderr=said)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            continue


def worst(*codes: int) -> int:
    """Return the first exit code that is not 0."""
    return next((code for code in codes if code), 0)


def together(first: Callable[[], int], second: Callable[[IO[str]], int]) -> int:
    """Do two things at once; return the first exit code that is not 0.

    What the first prints is shown as it comes, and what the second has written into its file when both
    have ended: lines of two at a time cannot be read.
    """
    with ThreadPoolExecutor() as pool, tempfile.TemporaryFile("w+") as file:
        started = pool.submit(second, file)
        code = first()
        started.exception()  # waits
        file.seek(0)
        shutil.copyfileobj(file, sys.stdout)
        sys.stdout.flush()
        return worst(code, started.result())
