"""The options of a connector on a command line: ``-o NAME=VALUE``."""

from __future__ import annotations

from collections.abc import Sequence

import click


def options_of(given: Sequence[str]) -> dict[str, str]:
    """Return options by name.

    Raises:
        BadParameter: one is not NAME=VALUE.
    """
    pairs = [option.partition("=") for option in given]
    for name, equals, _ in pairs:
        if not equals:
            raise click.BadParameter(f"{name!r} is not NAME=VALUE.", param_hint="--option")
    return {name: text for name, _, text in pairs}
