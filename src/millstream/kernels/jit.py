"""Functions over arrays, compiled by numba where it is installed (the extras ``compiled`` and ``patterns``).

They are written in the part of Python that numba compiles, and run as they are without it. Compiling takes seconds the
first time on a machine, and loading what was compiled before about one: so who calls them decides whether that pays.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])

_loading = threading.Lock()


@cache
def is_available() -> bool:
    """Return whether numba is installed, and takes the numpy that is; it is loaded to see that."""
    try:
        import_module("numba")
    except ImportError:
        return False
    return True


def compiled(
    function: Function, *modules: ModuleType, allocates: bool = True, inlined: bool = False
) -> Function:
    """Return the compiled function; it is compiled, or loaded, when it is first called.

    ``modules`` have the functions that it calls. What is kept for other processes is told by the file of the function
    alone: it must change where one of these does. Of a function that makes no arrays, and calls none that does,
    ``allocates=False`` leaves out the counting of references to arrays, which each call that is given one does.
    ``inlined``: the functions that it calls become a part of it. That is for those that are given tuples of many arrays: a
    call hands over each field of each array, which may take longer than what it does.
    """
    with _loading:
        return cast("Function", _compiled(function, modules, allocates=allocates, inlined=inlined))


def is_kept(function: Callable[..., Any]) -> bool:
    """Return whether an earlier process has compiled a function, and kept that where this one looks for it.

    What is kept may be of an older version: then it is compiled all the same.
    """
    places = [Path(function.__code__.co_filename).parent / "__pycache__"]
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        places = [one for one in Path(chosen).glob("*") if one.is_dir()]
    pattern = f"*.{function.__name__}-*.nbi"
    return any(next(place.glob(pattern), None) is not None for place in places)


@cache
def _compiled(
    function: Callable[..., Any],
    modules: tuple[ModuleType, ...],
    *,
    allocates: bool = True,
    inlined: bool = False,
) -> Callable[..., Any]:
    numba: Any = import_module("numba")
    options = {} if allocates else {"_nrt": False}
    for module in modules:
        _register(module, **options, **({"forceinline": True} if inlined else {}))
    made: Callable[..., Any]
    try:
        made = numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to keep it in can be written to: each process compiles it
        made = numba.njit(**options)(function)
    return made


@cache
def _register(module: ModuleType, **options: bool) -> None:
    """Let compiled functions call those of a module."""
    extending: Any = import_module("numba.extending")
    register = extending.register_jitable
    register = register(**options) if options else register
    for each in vars(module).values():
        if isinstance(each, FunctionType) and each.__module__ == module.__name__:
            register(each)
