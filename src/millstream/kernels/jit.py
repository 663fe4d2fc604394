"""Functions over arrays, compiled by numba where it is installed (the extras ``compiled`` and ``patterns``).

They are written in the part of Python that numba compiles, and run as they are without it. Compiling takes seconds the
first time on a machine, and loading what was compiled before about one: so who calls them decides whether that pays.

What is compiled is kept for other processes. By itself, numba would load it for as long as the file of the function is the
same, whatever became of the functions and constants that it uses. So what is kept is named by a digest of all of these. They are read
in memory, as numba does: the files may be of a newer version than this process.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, TypeVar, cast

import numpy as np

from millstream.kernels.code_digest import code_digest, digest, instructions_digest

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

    ``modules`` have the functions that it calls. Of a function that makes no arrays, and calls none that does,
    ``allocates=False`` leaves out the counting of references to arrays, which each call that is given one does.
    ``inlined``: the functions that it calls become a part of it. That is for those that are given tuples of many arrays: a
    call hands over each field of each array, which may take longer than what it does.
    """
    with _loading:
        return cast("Function", _compiled(function, modules, allocates=allocates, inlined=inlined))


def is_kept(
    function: Callable[..., Any],
    *modules: ModuleType,
    allocates: bool = True,
    inlined: bool = False,
) -> bool:
    """Return whether an earlier process has kept what :func:`compiled` would make of the same."""
    places = [Path(function.__code__.co_filename).parent / "__pycache__"]
    if chosen := os.environ.get("NUMBA_CACHE_DIR"):
        places = [one for one in Path(chosen).glob("*") if one.is_dir()]
    name = _kept_name(function, modules, allocates=allocates, inlined=inlined)
    return any(next(place.glob(f"*.{name}-*.nbi"), None) is not None for place in places)


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
    named = _named(function, _kept_name(function, modules, allocates=allocates, inlined=inlined))
    made: Callable[..., Any]
    try:
        made = _forgiving(numba.njit(cache=True, **options)(named))
    except RuntimeError:  # no folder to keep it in can be written to: each process compiles it
        made = numba.njit(**options)(function)
    return made


def _forgiving(made: Any) -> Any:
    """Let what is kept be damaged, and the disk be full: then it is compiled, as if nothing was kept."""
    kept = getattr(made, "_cache", None)
    if kept is None:  # compiling is switched off
        return made
    load, save = kept.load_overload, kept.save_overload

    def load_overload(*given: Any) -> Any:
        try:
            return load(*given)
        except Exception:  # noqa: BLE001 - whatever unpickling of damaged bytes may raise
            with suppress(OSError):
                kept.flush()
            return None

    def save_overload(*given: Any) -> None:
        with suppress(OSError):
            save(*given)

    kept.load_overload, kept.save_overload = load_overload, save_overload
    return made


def _named(function: Callable[..., Any], name: str) -> FunctionType:
    """Return the function under another name, by which numba names what it keeps of it."""
    assert isinstance(function, FunctionType)
    named = FunctionType(
        function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
    )
    named.__qualname__ = name
    return named


@cache
def _kept_name(
    function: Callable[..., Any],
    modules: tuple[ModuleType, ...],
    *,
    allocates: bool,
    inlined: bool,
) -> str:
    """Name a function by all that decides what is compiled: functions, constants, options, and the packages that have a part in it."""
    told = [f"{allocates} {inlined}"]
    told += [f"{package} {_version(package)}" for package in ("numba", "llvmlite", "numpy")]
    for module in _reached(sys.modules[function.__module__], *modules):
        told += [f"{module.__name__}.{one}" for one in _contents(module)]
    return f"{function.__name__}_{digest(';'.join(sorted(told)))}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def _reached(*modules: ModuleType) -> list[ModuleType]:
    """Return modules, and those of the same package whose functions they have."""
    found: list[ModuleType] = []
    ahead = list(modules)
    while ahead:
        module = ahead.pop()
        if module in found:
            continue
        found.append(module)
        package = module.__name__.partition(".")[0]
        for each in vars(module).values():
            name = each.__name__ if isinstance(each, ModuleType) else _module_of(each)
            if name.partition(".")[0] == package and name in sys.modules:
                ahead.append(sys.modules[name])
    return found


def _module_of(value: Any) -> str:
    return value.__module__ if isinstance(value, FunctionType) else ""


def _contents(module: ModuleType) -> Iterator[str]:
    """Tell the functions, constants and tuples with names of a module, with their names in it."""
    for name, value in vars(module).items():
        if name.startswith("__"):
            continue
        if isinstance(value, FunctionType):
            yield f"{name} {instructions_digest(value)}"
        elif isinstance(value, type) and hasattr(value, "_fields"):
            yield f"{name} {value.__qualname__} {value._fields}"
        elif isinstance(value, (bool, int, float, str, bytes, tuple, np.ndarray, np.generic)):
            yield f"{name} {code_digest(value)}"


@cache
def _register(module: ModuleType, **options: bool) -> None:
    """Let compiled functions call those of a module."""
    extending: Any = import_module("numba.extending")
    register = extending.register_jitable
    register = register(**options) if options else register
    for each in vars(module).values():
        if isinstance(each, FunctionType) and each.__module__ == module.__name__:
            register(each)
