"""The program of an app while it is edited: its files, whether they have changed, and loading it again."""

from __future__ import annotations

import linecache
import sys
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.cli.run import find_app
from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from millstream.pipeline.app import App

FileStates = dict[Path, tuple[int, int]]  # by file: when it was written, and its size
_NOT_THE_USERS = ("site-packages", "dist-packages")


class ProgramError(Exception):
    """A program cannot be loaded; the text is what its author sees."""


@dataclass
class WatchedProgram:
    """A file with an app, and the modules that it imports from its own folder.

    ``name`` says which app, where the file declares several; ``log`` replaces the one that the app names.
    """

    file: Path
    name: str | None
    log: Path | str | None = None
    _modules: dict[str, Path] = field(default_factory=dict)

    def file_states(self) -> FileStates:
        """Return what tells whether a file was saved since. A file that is gone for a moment, as editors do, is left out."""
        states: FileStates = {}
        for path in (self.file, *self._modules.values()):
            try:
                found = path.stat()
            except OSError:
                continue
            states[path] = found.st_mtime_ns, found.st_size
        return states

    def load(self) -> App:
        """Load the program as it is now, and return its app.

        Raises:
            ProgramError: it has a mistake.
        """
        linecache.checkcache()
        for name in self._modules:
            sys.modules.pop(name, None)
        before = set(sys.modules)
        try:
            app = find_app(self.file, self.name)
            if self.log is not None:
                app.use_log(self.log)
        except MillstreamError as error:
            raise ProgramError(str(error)) from None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a program may raise anything
            raise ProgramError(self._explained(error)) from None
        finally:
            self._note_modules(before)
        return app

    def _note_modules(self, before: set[str]) -> None:
        """Remember the modules of the program's own folder, to watch them, and to load them again."""
        folder = self.file.absolute().parent
        for name in set(sys.modules) - before:
            given = getattr(sys.modules[name], "__file__", None)
            path = None if given is None else Path(given).absolute()
            if path is None or not path.is_relative_to(folder):
                continue
            if not any(part in _NOT_THE_USERS for part in path.parts):
                self._modules[name] = path

    def _explained(self, error: BaseException) -> str:
        """Return the error as Python shows it, from the program's own first line on."""
        folder = str(self.file.absolute().parent)
        stack = traceback.extract_tb(error.__traceback__)
        names = [str(Path(frame.filename).absolute()) for frame in stack]
        first = next((n for n, name in enumerate(names) if name.startswith(folder)), len(stack))
        shown = traceback.format_list(stack[first:])
        return "".join([*shown, *traceback.format_exception_only(error)]).rstrip()
