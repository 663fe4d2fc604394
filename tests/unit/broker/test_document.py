"""docs/broker.md tells what the broker speaks and how its command is called, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from millstream.broker.dispatch import HANDLERS, NON_PRODUCE_BYTES_MAX
from millstream.broker.memory import SMALL_BYTES_MAX
from millstream.broker.protocol.wire import ELEMENTS_MAX
from millstream.broker.requests.configs import FIXED_CONFIGS
from millstream.broker.requests.transactions import ID_CHARACTERS_MAX
from millstream.broker.settings import BrokerSettings
from millstream.broker.share.group import MEMBERS_MAX
from millstream.broker.share.session import SESSIONS_MAX
from millstream.cli.broker import broker

TEXT = (Path(__file__).parents[3] / "docs" / "broker.md").read_text()


def test_the_table_of_apis_is_what_is_answered() -> None:
    told = re.findall(r"(?m)^\| (\w+) \| (\d+) \| (\d+)(?:\u2013(\d+))? \|$", TEXT)
    assert [(name, int(key), (int(low), int(high or low))) for name, key, low, high in told] == [
        (api.name, api.key, api.versions) for api in sorted(HANDLERS, key=lambda api: api.key)
    ]


def test_the_options_are_those_of_the_command() -> None:
    options = {name for option in broker.params for name in option.opts if name.startswith("--")}
    assert set(re.findall(r"(?m)^\| `(--[a-z-]+)", TEXT)) == options


@pytest.mark.not_in_lane("thresholds", "one of them is lowered there")
def test_the_limits_are_those_that_hold() -> None:
    settings, mib = BrokerSettings(), 1 << 20
    for number in (
        f"{settings.connections_max:,}",
        f"{settings.requests_bytes_max // mib} MiB",
        f"{settings.responses_bytes_max // mib} MiB",
        f"{settings.response_bytes_max // mib} MiB, or one batch",
        f"{settings.request_bytes_max // mib} MiB",
        f"{NON_PRODUCE_BYTES_MAX // mib} MiB without records",
        f"{ELEMENTS_MAX:,}",
        f"{SMALL_BYTES_MAX // 1024} KiB",
        f"{settings.contended_s:.0f} seconds",
        f"{settings.batch_plain_bytes_max // mib} MiB decompressed",
        f"{settings.batch_records_max:,} records",
        f"{settings.members_bytes_max // mib} MiB together, and {settings.group_members_max:,}",
        f"{MEMBERS_MAX} of a share group",
        f"{settings.transactional_ids_max:,}, of {ID_CHARACTERS_MAX:,} characters",
        f"{SESSIONS_MAX:,}: `SHARE_SESSION_LIMIT_REACHED`",
    ):
        assert number in TEXT


def test_the_settings_that_are_taken_with_one_value_are_named() -> None:
    assert all(f"`{name}`" in TEXT for name in FIXED_CONFIGS)
