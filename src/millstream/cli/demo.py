"""`millstream demo`: whole pipelines on data that comes with the package."""

from __future__ import annotations

import click
from rich.console import Console

from millstream.demo.ads_run import run_ads
from millstream.demo.feed import SPEED


@click.group()
def demo() -> None:
    """Run a whole pipeline on data that comes with the package, and check its answer."""


@demo.command("ads")
@click.option(
    "--log",
    default="./demo-data",
    show_default=True,
    type=click.Path(),
    help="The folder to work in. It is made, and emptied when a run begins anew.",
)
@click.option(
    "--speed",
    default=SPEED,
    show_default=True,
    type=click.FloatRange(min=0, min_open=True),
    help="Hours of the week that pass per second.",
)
@click.option(
    "--seed",
    default=1,
    show_default=True,
    type=int,
    help="Chooses how the events are delayed, mixed up and repeated.",
)
@click.option("--fresh", is_flag=True, help="Begin anew, even if a run was interrupted.")
@click.pass_context
def ads(context: click.Context, log: str, speed: float, seed: int, *, fresh: bool) -> None:
    """Click rates of a real week of advertising, kept up to date while events arrive.

    60,000 impressions and 287 clicks go through the log, late, mixed up and some of them twice.
    Spark keeps the rates per campaign and hour; at the end they are compared with a plain
    computation over the whole week. Kill it at any moment and start it again: it goes on, and the
    answer is the same.

    \b
    Examples:
      millstream demo ads
      millstream demo ads --speed 100 --seed 7 --fresh
      millstream view show ctr_by_hour --log ./demo-data
    """
    context.exit(run_ads(log, seed=seed, speed=speed, fresh=fresh, console=Console()))
