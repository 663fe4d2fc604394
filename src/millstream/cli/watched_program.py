"""The program of an app while it is edited: its files, whether they have changed, and loading it again."""

from __future__ import annotations

import linecache
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import invalidate_caches
from importlib.util import cache_from_source
from pathlib import Path
from typing import TYPE_CHECKING

from millstream.cli.program_error import ProgramError, shown_error
from millstream.cli.run import find_app
from millstream.errors import MillstreamError

if TYPE_CHECKING:
    from millstream.pipeline.app import App

FileStates = dict[Path, tuple[int, int]]  # by file: when it was written, and its size
_TICK_NS = 20_000_000  # by how much the clock of a file system may be behind
_NOT_THE_USERS = ("site-packages", "dist-packages")


@dataclass
class WatchedProgram:
    """A file with an app, and the modules that it imports from its own folder.

    ``name`` says which app, where the file declares several; ``log`` replaces the one that the app names.
    """

    file: Path
    name: str | None
    log: Path | str | None = None
    _modules: dict[str, Path] = field(default_factory=dict)
    _failed: set[Path] = field(default_factory=set)  # what the last mistake is in, or lacks
    _loaded: FileStates = field(default_factory=dict)
    _not_the_programs: set[str] = field(default_factory=lambda: set(sys.modules))

    @property
    def is_changed(self) -> bool:
        """Whether a file was saved since the program was loaded, or while it was."""
        return self._file_states() != self._loaded

    def _file_states(self) -> FileStates:
        """Return what tells whether a file was saved since. A file that is gone for a moment, as editors do, is left out."""
        states: FileStates = {}
        for path in (self.file, *self._modules.values(), *self._failed):
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
        self._forget_modules()
        began_ns, before = time.time_ns(), self._file_states()
        self._failed = set()
        try:
            app = find_app(self.file, self.name)
            if self.log is not None:
                app.use_log(self.log)
        except ProgramError as error:
            self._note_mistake(error.__cause__ or error)
            raise ProgramError(error.explained) from None
        except MillstreamError as error:
            self._note_mistake(error)
            raise ProgramError(shown_error(error)) from None
        finally:
            self._note_modules()
            self._loaded = self._states_read(before, began_ns)
        return app

    def _forget_modules(self) -> None:
        """Have Python read the program's own modules again."""
        linecache.checkcache()
        self._note_modules()  # functions of the program import, too
        for name, path in self._modules.items():
            sys.modules.pop(name, None)
            self._forget_folders(name)
            # Python takes the bytecode of a file for current by its size and its time in whole seconds.
            with suppress(OSError, NotImplementedError):
                Path(cache_from_source(str(path))).unlink()
        invalidate_caches()  # a module that was missing may be there now

    def _forget_folders(self, module: str) -> None:
        """Have Python forget the folders without ``__init__.py`` that a module is in: they know it as it was."""
        while module := module.rpartition(".")[0]:
            if getattr(sys.modules.get(module), "__file__", None) is None:
                sys.modules.pop(module, None)

    def _states_read(self, before: FileStates, began_ns: int) -> FileStates:
        """Return the states of the files as they were read at the latest; what was saved since is another one."""
        return {
            path: before.get(path, state)
            for path, state in self._file_states().items()
            if path in before or state[0] < began_ns - _TICK_NS
        }

    def _note_modules(self) -> None:
        """Remember the modules of the program's own folder, to watch them, and to load them again."""
        for name in set(sys.modules) - self._not_the_programs:
            given = getattr(sys.modules.get(name), "__file__", None)
            path = None if given is None else Path(given).absolute()
            if path is not None and self._is_the_programs(path):
                self._modules[name] = path
            else:
                self._not_the_programs.add(name)

    def _note_mistake(self, error: BaseException) -> None:
        """Remember the files in which a mistake can be corrected: a module that fails is not among Python's."""
        found = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        if isinstance(error, SyntaxError) and error.filename is not None:
            found.append(error.filename)
        if isinstance(error, ImportError) and error.name is not None:
            place = self.file.absolute().parent.joinpath(*error.name.split("."))
            found += [f"{place}.py", str(place / "__init__.py")]
        paths = {Path(name).absolute() for name in found}
        self._failed = {path for path in paths if self._is_the_programs(path)}

    def _is_the_programs(self, path: Path) -> bool:
        """Return whether a file is in the program's own folder, and of no library there."""
        inside = path.is_relative_to(self.file.absolute().parent)
        return inside and not any(part in _NOT_THE_USERS for part in path.parts)
