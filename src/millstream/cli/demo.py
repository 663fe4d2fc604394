"""`millstream demo`: whole pipelines on data that comes with the package."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click
from rich.console import Console

from millstream.cli.tables import Choice
from millstream.client.address import log_folder
from millstream.demo.ads_chaos import run_chaos
from millstream.demo.ads_input import AdsInput
from millstream.demo.ads_run import AdsOptions, run_ads
from millstream.views.server.server import LISTEN_DEFAULT


@click.group()
def demo() -> None:
    """Run a whole pipeline on data that comes with the package, and check its results."""


@demo.command("ads")
@click.option(
    "--log",
    default="./demo-data",
    show_default=True,
    metavar="FOLDER|kafka://HOST:PORT",
    help="The log: a folder, which is created, and emptied when a run starts over; or that of brokers. "
    "MILLSTREAM_LOG does not count here.",
)
@click.option(
    "--folder",
    type=click.Path(path_type=Path),
    help="Where state and views are kept. [default: the folder of the log; for brokers ./demo-data]",
)
@click.option(
    "--input",
    "source",
    default="week",
    show_default=True,
    type=Choice(["week", "generated"]),
    help="A real week of impressions and clicks, or generated ones around the end of a month.",
)
@click.option(
    "--rate",
    default=1_000,
    show_default=True,
    type=click.IntRange(min=1),
    help="Generated: impressions per second of event time.",
)
@click.option(
    "--minutes",
    default=10.0,
    show_default=True,
    type=click.FloatRange(min=0.1),
    help="Generated: how many minutes of event time.",
)
@click.option(
    "--speed",
    type=click.FloatRange(min=0, min_open=True),
    help="How many times faster than real time. [default: 36000 for the week, which takes about 24 "
    "seconds then; 1 for generated events]",
)
@click.option(
    "--seed",
    default=1,
    show_default=True,
    type=int,
    help="Chooses how events are delayed, reordered and repeated.",
)
@click.option(
    "--chaos",
    is_flag=True,
    help="Kill the pipeline and its workers several times, and inject many more faults.",
)
@click.option(
    "--no-kills", is_flag=True, hidden=True, help="With --chaos: the faults without the kills."
)
@click.option(
    "--master", metavar="URL", help="Run on this Spark cluster, such as spark://host:7077."
)
@click.option("--fresh", is_flag=True, help="Start over, even if a run was interrupted.")
@click.option(
    "--page",
    default=LISTEN_DEFAULT,
    show_default=True,
    metavar="HOST:PORT",
    help='Where to serve the page; another port if it is taken. "none" for no page.',
)
@click.option(
    "--stay/--no-stay",
    default=None,
    help="Keep the page after the end, until Ctrl-C. [default: in a terminal]",
)
@click.pass_context
def ads(
    context: click.Context,
    *,
    log: str,
    folder: Path | None,
    source: Literal["week", "generated"],
    rate: int,
    minutes: float,
    speed: float | None,
    seed: int,
    page: str,
    chaos: bool,
    no_kills: bool,
    master: str | None,
    fresh: bool,
    stay: bool | None,
) -> None:
    """Ads: rates, budgets, and ads to stop, updated while events arrive.

    A real week of 60,000 impressions and 287 clicks goes through the log, late, out of order, from
    devices with wrong clocks, and some of it twice. Spark keeps the rates per minute and ad, what
    each client has spent of its budget, and the ads that are to be stopped, on a page that is live.
    At the end all of it is compared with a plain computation over the raw log. Kill it at any moment
    and start it again: it resumes, and the result is the same.

    \b
    Examples:
      millstream demo ads
      millstream demo ads --chaos
      millstream demo ads --input generated --rate 5000 --minutes 5 --fresh
      millstream demo ads --speed 360000 --seed 7 --fresh --page none
      millstream demo ads --log kafka://localhost:9092
      millstream demo ads --log kafka://localhost:9092 --master spark://localhost:7077
      millstream view show ad_ctr --log ./demo-data
    """
    console = Console()
    given = AdsInput(source, seed, rate, minutes, chaos=chaos)
    options = AdsOptions(
        log=log,
        folder=folder or log_folder(log) or Path("demo-data"),
        input=given,
        speed=speed or given.speed,
        fresh=fresh,
        master=master,
        page=page,
        stay=console.is_terminal if stay is None else stay,
    )
    context.exit((run_chaos if chaos and not no_kills else run_ads)(options, console))
