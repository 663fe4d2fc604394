"""Runs a page of the guide from top to bottom in one folder, as its reader would, and compares what it shows.

| Block | What happens |
|---|---|
| `python` with a first line `# name.py` | is saved; and run, if what it prints follows |
| `python` without one | is run |
| `sh` | its lines are run |
| any, below `<!-- file: name -->` | is saved |
| any, below `<!-- not run: why -->` | nothing, nor with the text that it is followed by |
| `text` right after a block that was run | is compared with what that has printed; `…` stands for anything |

A page has one folder, and goes by its order. `python tests/guide_page.py PAGE…` writes what the blocks print into pages.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from millstream.cli.main import run as run_command

BLOCK = re.compile(
    r"^(?:<!-- (?P<note>[^\n]+) -->\n)?```(?P<kind>\w+)\n(?P<text>.*?)^```$"
    r"(?:\n\n```text\n(?P<shown>.*?)^```$)?",
    re.MULTILINE | re.DOTALL,
)
FILE_NAME = re.compile(r"# (\w+\.py)\n")
RUNNABLE = ("python", "sh")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page, the note above it, and the text below it that shows what it prints."""

    line: int
    kind: str
    text: str
    note: str
    shown: str | None
    shown_at: tuple[int, int]

    @property
    def file_name(self) -> str | None:
        if self.note.startswith("file: "):
            return self.note.removeprefix("file: ")
        named = FILE_NAME.match(self.text) if self.kind == "python" else None
        return named[1] if named else None

    @property
    def is_run(self) -> bool:
        if self.note.startswith("not run: ") or self.kind not in RUNNABLE:
            return False
        return self.file_name is None or self.shown is not None


def blocks_of(page: str) -> Iterator[Block]:
    """Give the blocks of a page in order."""
    for found in BLOCK.finditer(page):
        if found["kind"] != "text":
            line = page.count("\n", 0, found.start()) + 1
            yield Block(
                line,
                found["kind"],
                found["text"],
                found["note"] or "",
                found["shown"],
                found.span("shown"),
            )


def perform(block: Block, folder: Path) -> str | None:
    """Do what a block is there for; return what it prints, or nothing if it is not run.

    The folder is the current one already.
    """
    if (name := block.file_name) and not block.note.startswith("not run: "):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(block.text)
    if not block.is_run:
        return None
    if block.kind == "sh":
        return "".join(run_line(line) for line in lines_of(block.text))
    if name is None:
        name = "block.py"
        (folder / name).write_text(block.text)
    return run_line(f"python {name}")


def lines_of(script: str) -> list[str]:
    """Give the command lines of a script: without comments, joined where a backslash ends one."""
    joined = script.replace("\\\n", " ")
    return [
        stripped
        for line in joined.splitlines()
        if (stripped := re.sub(r"(^|\s)#.*", "", line).strip())
    ]


def run_line(line: str) -> str:
    """Run a command line and return what it prints.

    Ours, and programs in Python, are run in this process: it has loaded polars and Arrow already.
    """
    if line.startswith("export "):
        name, _, value = line.removeprefix("export ").partition("=")
        os.environ[name] = value
        return ""
    words = shlex.split(line)
    if words[0] == "millstream" and not {"<", "|", ">", "&&", "||", ";"} & set(words):
        return in_this_process(lambda: run_command(words[1:]), words[1:])
    if words[0] == "python" and words[1].endswith(".py"):
        return in_this_process(lambda: runpy.run_path(words[1], run_name="__main__"), words[1:])
    done = subprocess.run(
        ["sh", "-c", line], capture_output=True, text=True, check=False, env=shell_env()
    )
    return done.stdout + done.stderr


def shell_env() -> dict[str, str]:
    """Return the variables of a shell in which the environment of this Python is active."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "COLUMNS": "100",
    }


def in_this_process(call: object, arguments: list[str]) -> str:
    """Call something with the arguments of its command line; return what it prints on both streams."""
    printed = io.TextIOWrapper(io.BytesIO(), write_through=True)  # some commands print bytes
    before = sys.argv, sys.path[:], set(sys.modules)
    sys.argv = arguments
    sys.path.insert(0, str(Path.cwd()))
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            call()  # type: ignore[operator]
    finally:
        sys.argv, sys.path[:] = before[0], before[1]
        here = str(Path.cwd())
        for name in set(sys.modules) - before[2]:  # files of the page change from block to block
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(here):
                del sys.modules[name]
    return printed.buffer.getvalue().decode()  # type: ignore[attr-defined]


def is_as_shown(printed: str, shown: str) -> bool:
    """Say whether what was printed is what the page shows; spaces at the ends of lines do not count."""
    pattern = re.escape(_stripped(shown)).replace(re.escape("…"), ".*?")
    return re.fullmatch(pattern, _stripped(printed)) is not None


def _stripped(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n")


def rewritten(page: str) -> str:
    """Return a page with what its blocks print here and now, where it shows something else."""
    changes = []
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name):
        for block in blocks_of(page):
            printed = perform(block, Path(name))
            if printed and (block.shown is None or not is_as_shown(printed, block.shown)):
                print(f"line {block.line}:\n{printed}")
                if block.shown is not None:
                    changes.append((block.shown_at, _stripped(printed) + "\n"))
    for (start, end), printed in reversed(changes):
        page = page[:start] + printed + page[end:]
    return page


if __name__ == "__main__":
    for given in sys.argv[1:]:
        path = Path(given).resolve()
        path.write_text(rewritten(path.read_text()))
