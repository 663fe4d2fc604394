"""``millstream bloom``: how many events Bloom filters lose, for a memory, a rate and a horizon."""

from __future__ import annotations

import dataclasses

import click

from millstream.cli.byte_sizes import describe_bytes, parse_bytes
from millstream.cli.tables import TableColumn, TableRow, json_option, print_json, print_table
from millstream.durations import format_us, to_us
from millstream.kernels.dedup.bloom_loss import RATE_MAX, RATE_MIN, Loss, expected_loss

_STEPS = (-2, -1, 0, 1, 2)  # the rows around the one that was asked for


@click.command()
@click.option("--within", required=True, metavar="DURATION", help="The horizon of dedup.")
@click.option(
    "--events-per-second", type=float, metavar="NUMBER", help="Different ids in a second."
)
@click.option("--memory", metavar="SIZE", help="Memory of all filters together: 64MB, 2GiB.")
@click.option("--fpr", type=float, metavar="RATE", help="The false-positive rate, such as 1e-4.")
@click.option(
    "--rotate",
    metavar="DURATION",
    help="Event time of one generation of filters.  [default: a quarter of within]",
)
@json_option
def bloom(
    within: str,
    events_per_second: float | None,
    memory: str | None,
    fpr: float | None,
    rotate: str | None,
    *,
    as_json: bool,
) -> None:
    """Show how many events Bloom filters lose, for a memory, a rate and a horizon.

    A false positive is a new event that is taken for a repeat, and lost. Give two of
    --events-per-second, --memory and --fpr: the third is computed, and shown
    with smaller and larger values. Memory is that of all buckets together, with every generation full.

    \b
    Examples:
      millstream bloom --within "30 minutes" --events-per-second 20000 --memory 64MB
      millstream bloom --within "7 days" --rotate "12 hours" --events-per-second 330 --fpr 1e-4
      millstream bloom --within "1 hour" --memory 1GiB --fpr 1e-6 --json
    """
    memory_bytes = None if memory is None else parse_bytes(memory, what="--memory")

    def loss(memory_bytes: int | None, fpr: float | None) -> Loss:
        return expected_loss(
            within=within,
            events_per_second=events_per_second,
            memory_bytes=memory_bytes,
            fpr=fpr,
            rotate=rotate,
        )

    asked = loss(memory_bytes, fpr)
    losses = []
    for step in _STEPS:
        if step == 0:
            losses.append(asked)
        elif fpr is None:
            assert memory_bytes is not None
            losses.append(loss(max(1, round(memory_bytes * 2.0**step)), None))
        elif RATE_MIN <= fpr * 10.0**-step <= RATE_MAX:
            losses.append(loss(memory_bytes, fpr * 10.0**-step))
    rows = [_row(one, asked) for one in losses]
    if as_json:
        print_json(rows)
    else:
        click.echo(_heading(asked, within))
        print_table(rows, _COLUMNS)


def _row(loss: Loss, asked: Loss) -> TableRow:
    return {
        **dataclasses.asdict(loss),
        "lost_per_million": loss.lost_per_million,
        "lost_per_hour": loss.lost_per_hour,
        "lost_per_day": loss.lost_per_day,
        "asked": loss is asked,
    }


def _heading(asked: Loss, within: str) -> str:
    return (
        f"Within {format_us(to_us(within, what='within'))}, {asked.generations} generations of "
        f"{format_us(asked.rotate_us)} hold at most {_number(asked.ids_held)} ids at "
        f"{_number(asked.events_per_second)} a second.\n"
    )


def _number(value: float) -> str:
    """Say a number with three digits that count: ``1,280,000``, ``0.0241``, ``3.1e-09``."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}"


_COLUMNS = [
    TableColumn("", lambda row: "→" if row["asked"] else ""),
    TableColumn("memory", lambda row: describe_bytes(row["memory_bytes"])),
    TableColumn("bits per id", lambda row: _number(row["bits_per_id"])),
    TableColumn("ids per second", lambda row: _number(row["events_per_second"])),
    TableColumn("false positives", lambda row: _number(row["fpr"])),
    TableColumn("lost per million", lambda row: _number(row["lost_per_million"])),
    TableColumn("lost per hour", lambda row: _number(row["lost_per_hour"])),
    TableColumn("lost per day", lambda row: _number(row["lost_per_day"])),
]
