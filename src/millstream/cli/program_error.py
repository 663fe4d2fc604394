"""A mistake in the file of an app, as its author is shown it: what was raised, and the lines of their own files that led there."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millstream.errors import ConfigError, MillstreamError

_OURS = str(Path(__file__).parents[1]) + os.sep
_OF_LIBRARIES = ("site-packages", "dist-packages", f"lib{os.sep}python3")
_CAUSES_MAX = 5  # an exception may be the cause of another, and so on


class ProgramError(ConfigError):
    """The code of an app's file raises something, or cannot be read: correct it. ``explained`` says what and where."""

    def __init__(self, message: str, explained: str = "") -> None:
        super().__init__(message)
        self.explained = explained or message


@contextmanager
def program_mistakes(file: Path) -> Iterator[None]:
    """Turn what the code of a program raises in this block into one error, and add the place to an error of ours.

    Raises:
        ProgramError: the program raised it, or Python cannot read the program. Its cause is what was raised.
    """
    try:
        yield
    except MillstreamError as error:
        place = "".join(_users_lines(traceback.TracebackException.from_exception(error), file))
        if place:
            error.add_note(place.rstrip())
        raise
    except (Exception, SystemExit) as error:
        explained = _explained(error, file)
        raise ProgramError(f"{file} cannot be loaded:\n{explained}", explained) from error


def shown_error(error: MillstreamError) -> str:
    """Return an error for the one who reads it: its sentence, and where in the program that is, if it is known."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def _explained(error: BaseException, file: Path) -> str:
    """Return the user's own lines, and what was raised, as Python shows them."""
    found = traceback.TracebackException.from_exception(error)
    return "".join(_lines(found, file, _CAUSES_MAX)).rstrip()


def _lines(found: traceback.TracebackException, file: Path, causes_max: int) -> Iterator[str]:
    cause = found.__cause__
    if cause is None and not found.__suppress_context__:
        cause = found.__context__
    if cause is not None and causes_max:
        yield from _lines(cause, file, causes_max - 1)
        yield "which led to:\n"
    yield from _users_lines(found, file)
    yield from found.format_exception_only()
    for one in found.exceptions or ():
        yield from _lines(one, file, 0)


def _users_lines(found: traceback.TracebackException, file: Path) -> list[str]:
    """Return the lines of the user's files that led to an exception, each with its place."""
    own = [frame for frame in found.stack if _is_the_users(frame.filename, file)]
    return traceback.StackSummary.from_list(own).format()


def _is_the_users(name: str, file: Path) -> bool:
    path = Path(name).absolute()
    if path == file.absolute():
        return True
    of_others = name.startswith(("<", _OURS)) or any(part in name for part in _OF_LIBRARIES)
    return not of_others
