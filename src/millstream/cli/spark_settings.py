"""Spark's settings as a command line gives them: ``--conf NAME=VALUE``, and a file as spark-submit reads it."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from millstream.errors import ConfigError

# As in Java's files of properties: the first space, "=" or ":" ends the name.
_LINE = re.compile(r"\s*([^\s=:]+)\s*[=:\s]\s*(.*?)\s*")
_COMMENTS = ("#", "!")
_OPTIONS = {"spark.master": "--master", "spark.app.name": "the app's own name"}


def spark_settings(file: Path | None, pairs: Iterable[str]) -> dict[str, str]:
    """Return the settings of a file, and those of the pairs ``NAME=VALUE``, which override it.

    Raises:
        ConfigError: a pair or a line is no setting of Spark's, or sets what a run sets itself.

    """
    settings = {} if file is None else dict(_settings_of(file))
    for pair in pairs:
        name, sign, value = pair.partition("=")
        if not sign:
            raise ConfigError(
                f"--conf is {pair!r}; give NAME=VALUE, such as spark.executor.cores=2"
            )
        settings[_checked(name.strip(), "--conf")] = value.strip()
    return settings


def _settings_of(file: Path) -> Iterable[tuple[str, str]]:
    try:
        lines = file.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"--properties-file {file} can't be read: {error}. Give a text file with a setting of "
            "Spark's in each line, such as: spark.executor.cores 2"
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.lstrip().startswith(_COMMENTS):
            continue
        where = f"line {number} of {file}"
        if (found := _LINE.fullmatch(line)) is None:
            raise ConfigError(
                f"{where} is {line.strip()!r}; give the name of a setting and its value, such as: "
                "spark.executor.cores 2"
            )
        yield _checked(found[1], where), found[2]


def _checked(name: str, where: str) -> str:
    if not name.startswith("spark."):
        raise ConfigError(f"{where} sets {name!r}; the names of Spark's settings begin with spark.")
    if name in _OPTIONS:
        raise ConfigError(f"{where} sets {name}, which is {_OPTIONS[name]} here. Leave it out.")
    return name
