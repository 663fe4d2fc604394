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
from millstream.demo.ads_run import NO_PAGE, AdsOptions, run_ads
from millstream.demo.live_run import TERMINAL_S, UNATTENDED_S, LiveOptions, run_live
from millstream.pipeline.engine_choice import EngineName, choose_engine
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
@click.option(
    "--engine",
    type=Choice(["spark", "local"]),
    help="What runs the pipeline: Spark, or one process without Java. By default MILLSTREAM_ENGINE, or Spark.",
)
@click.option(
    "--live/--no-live",
    default=None,
    help="Go on with live events after the week: a bot is caught, the pipeline is killed. [default: with the week, "
    "a page, and a log that is a folder; not with --chaos or --master]",
)
@click.option(
    "--live-for",
    "live_s",
    type=click.FloatRange(min=10),
    metavar="SECONDS",
    help="How long live events arrive. [default: in a terminal until Ctrl-C, half an hour at most; else a minute]",
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
    engine: EngineName | None,
    live: bool | None,
    live_s: float | None,
    fresh: bool,
    stay: bool | None,
) -> None:
    """Ads: rates, budgets, and ads to stop, updated while events arrive.

    A real week of 60,000 impressions and 287 clicks goes through the log, late, out of order, from
    devices with wrong clocks, and some of it twice. Spark keeps the rates per minute and ad, what
    each client has spent of its budget, and the ads that are to be stopped, on a page that is live.
    At the end all of it is compared with a plain computation over the raw log. Kill it at any moment
    and start it again: it resumes, and the result is the same.

    Then events go on arriving: the page moves, a bot that clicks ads raises an alarm, and the pipeline
    is killed and goes on. After Ctrl-C all is compared again, and told in figures.

    \b
    Examples:
      millstream demo ads
      millstream demo ads --engine local
      millstream demo ads --chaos
      millstream demo ads --input generated --rate 5000 --minutes 5 --fresh
      millstream demo ads --speed 360000 --seed 7 --fresh --page none
      millstream demo ads --log kafka://localhost:9092
      millstream demo ads --log kafka://localhost:9092 --master spark://localhost:7077
      millstream view show ad_ctr --log ./demo-data
    """
    console = Console()
    given = AdsInput(source, seed, rate, minutes, chaos=chaos)
    where = folder or log_folder(log) or Path("demo-data")
    stays = console.is_terminal if stay is None else stay
    if live is None:
        local = master is None and log_folder(log) is not None
        live = source == "week" and local and not chaos and page != NO_PAGE
    options = AdsOptions(
        log=log,
        folder=where,
        input=given,
        speed=speed or given.speed,
        fresh=fresh,
        master=master,
        page=page,
        stay=stays and not live,
        engine=engine,
    )
    code = (run_chaos if chaos and not no_kills else run_ads)(options, console)
    if code == 0 and live:
        seconds = live_s or (TERMINAL_S if console.is_terminal else UNATTENDED_S)
        chosen = choose_engine(engine)
        code = run_live(LiveOptions(where, page, chosen, seconds, seed, stays), console)
    context.exit(code)
