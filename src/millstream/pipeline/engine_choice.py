"""Which engine runs an app: what the program says, its command line, its environment; else a default."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args

from millstream.choices import choose

EngineName = Literal["spark", "local"]
ENGINES = get_args(EngineName)
ENGINE_VARIABLE = "MILLSTREAM_ENGINE"
_OPTION = "--engine"
_WAY_OUT = ' If the option is one of the program\'s own, say app.run(engine="spark"): then the command line is not asked.'


def choose_engine(given: EngineName | None, default: EngineName = "spark") -> EngineName:
    """Return the engine of a run: the one given, or what ``--engine`` or MILLSTREAM_ENGINE says, or the default.

    Raises:
        ConfigError: there is no such engine.
    """
    if given is not None:
        return choose("run's engine", given, ENGINES)
    told = _option_of(sys.argv[1:])
    if told is not None:
        return choose(f"{_OPTION} of {Path(sys.argv[0]).name}", told, ENGINES, _WAY_OUT)
    return choose(ENGINE_VARIABLE, os.environ.get(ENGINE_VARIABLE) or default, ENGINES)


def _option_of(arguments: Sequence[str]) -> str | None:
    """Return what a program's own command line says, so that ``python app.py --engine local`` needs no parser."""
    for place, argument in enumerate(arguments):
        if argument == _OPTION:
            return arguments[place + 1] if place + 1 < len(arguments) else ""
        if argument.startswith(f"{_OPTION}="):
            return argument.removeprefix(f"{_OPTION}=")
    return None
