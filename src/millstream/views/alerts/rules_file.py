"""The file of rules of `millstream alert`: TOML, with the same words as :func:`millstream.alert`.

::

    [tell.chat]
    webhook = "https://chat.example/hook"

    [[rule]]
    name = "behind"
    metric = "source_lag_seconds"
    above = 300
    held = "2 minutes"
    tell = ["chat"]
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from millstream.choices import did_you_mean
from millstream.errors import ConfigError
from millstream.views.alerts.rule import (
    AlertRule,
    alert,
    check_alert_names,
    check_rule_sources,
)
from millstream.views.alerts.targets import AlertTarget, tell_command, tell_email, tell_webhook

_RULE_WORDS = {"name", "metric", "above", "below", "where", "over", "held", "repeat", "tell"}
_TARGET_WORDS = {
    "webhook": {"webhook", "headers", "header_variables"},
    "email": {"email", "server", "sender", "user", "starttls"},
    "command": {"command"},
}


def read_rules(path: Path) -> list[AlertRule]:
    """Return the rules of a file.

    ``headers`` of a webhook may name secrets: ``${env:NAME}``, ``${file:/path}``. ``header_variables`` names headers whose
    values are in variables of the environment. ``repeat = false``
    tells an alert once.

    Raises:
        ConfigError: the file cannot be read, or says something that is not possible; the message says where.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"The rules in {path} cannot be read: {error}") from None
    _check_words(str(path), content, {"tell", "rule"})
    if not isinstance(content.get("rule", []), list):
        raise ConfigError(f"{path} has {content['rule']!r} as rule. Give tables: [[rule]].")
    _check_words(f"{path}: tell", content.get("tell", {}), None)
    targets = {
        name: _target(f"{path}: [tell.{name}]", given)
        for name, given in content.get("tell", {}).items()
    }
    rules = [
        _rule(f"{path}: rule {number}", given, targets)
        for number, given in enumerate(content.get("rule", ()), 1)
    ]
    if not rules:
        raise ConfigError(f"{path} has no rule. Give one, as [[rule]]: see docs/watch.md.")
    check_alert_names(rules)
    check_rule_sources(rules)
    return rules


def _check_words(where: str, given: Any, known: set[str] | None) -> None:
    """Make sure that something is a table, with known words alone; None: with any."""
    if not isinstance(given, dict):
        raise ConfigError(f"{where} is {given!r}. Give a table.")
    for word in given:
        if known is not None and word not in known:
            raise ConfigError(
                f"{where} has {word!r}. Known are {', '.join(sorted(known))}.{did_you_mean(word, known)}"
            )


def _target(where: str, given: Any) -> AlertTarget:
    kinds = [kind for kind in _TARGET_WORDS if isinstance(given, dict) and kind in given]
    if len(kinds) != 1:
        raise ConfigError(f"{where} needs one of webhook, email, command.")
    _check_words(where, given, _TARGET_WORDS[kinds[0]])
    options = {name: value for name, value in given.items() if name != kinds[0]}
    value = given[kinds[0]]
    try:
        if kinds[0] == "webhook":
            return tell_webhook(value, headers=_headers(where, options))
        if kinds[0] == "email":
            return tell_email(value, **options)
        return tell_command(*([value] if isinstance(value, str) else value))
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{where} is not possible: {error}") from None


def _headers(where: str, options: Mapping[str, Any]) -> dict[str, str]:
    headers = dict(options.get("headers", {}))
    for header, variable in options.get("header_variables", {}).items():
        if variable not in os.environ:
            raise ConfigError(
                f"{where}: the variable {variable} of the header {header} is not set."
            )
        headers[header] = os.environ[variable]
    return headers


def _rule(where: str, given: Any, targets: Mapping[str, AlertTarget]) -> AlertRule:
    _check_words(where, given, _RULE_WORDS)
    options = dict(given)
    told = options.pop("tell", [])
    names = [told] if isinstance(told, str) else told
    if not isinstance(names, list):
        raise ConfigError(f"{where} is told to {told!r}. Give names of [tell].")
    for name in names:
        if not isinstance(name, str) or name not in targets:
            known = ", ".join(targets) or "none"
            raise ConfigError(
                f"{where} is told to {name!r}, which is none of [tell]: {known}."
                f"{did_you_mean(str(name), targets)}"
            )
    if options.get("repeat") is False:
        options["repeat"] = None
    try:
        return alert(
            options.pop("name", ""),
            options.pop("metric", ""),
            tell=[targets[name] for name in names],
            **options,
        )
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None
    except (TypeError, AttributeError) as error:
        raise ConfigError(f"{where} is not possible: {error}") from None
