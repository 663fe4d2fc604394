"""``millstream plan``: what an edited app would do to the state that it has, before it runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from millstream.cli.kept_version import kept_sentence
from millstream.cli.run import find_app, split_file
from millstream.cli.tables import (
    app_log_option,
    app_name_option,
    json_option,
    pluralize,
    print_json,
)
from millstream.durations import format_us
from millstream.errors import ConfigError

if TYPE_CHECKING:
    from millstream.ops.plan import ChangePlan
    from millstream.pipeline.app import App
    from millstream.views.state_store.part_change import PartChange

Command = Callable[..., Any]

_COLORS = {"keeps": "green", "drops": "yellow", "rebuilds": "yellow", "refuses": "red"}


_NAMED = "millstream.named"


def _remember(context: click.Context, _: click.Parameter, value: str | None) -> None:
    context.meta[_NAMED] = value


named_option = click.option(
    "--named",
    hidden=True,
    expose_value=False,
    callback=_remember,
    help="The name that the app must have; for who runs the command on a file that was named for an app.",
)


def edited_app_options(command: Command) -> Command:
    """Take the file of an app, and how it is compared with what has run."""
    for option in (
        click.option(
            "--same-expressions",
            is_flag=True,
            help="After an upgrade of polars or Python: confirm that expressions with unchanged text are the same.",
        ),
        app_log_option,
        app_name_option,
        named_option,
        click.argument("file", metavar="FILE[:APP]"),
    ):
        command = option(command)
    return command


from_option = click.option(
    "--from",
    "starts",
    metavar="TIME|earliest|TOPIC/PARTITION/OFFSET",
    multiple=True,
    help="Where in the log to begin, instead of where the app began: the first record of a time or later, by its timestamp; "
    "or an offset of each partition that is named; or earliest. What is rebuilt lacks what is before, and says so.",
)


def edited_app(file: str, name: str | None, address: Path | str | None) -> App:
    """Load the app of a file, over the log at an address if one is given.

    Raises:
        ConfigError: there is none, it is not clear which, or its name is not that of ``--named``.
    """
    path, name = split_file(file, name)
    context = click.get_current_context(silent=True)
    named = None if context is None else context.meta.get(_NAMED)
    app = find_app(path, name or named)
    if named not in (None, app.name):
        raise ConfigError(
            f"{file} is the program of the app {app.name!r}, and was named as that of {named!r}. Name the file of {named!r}, "
            "or FILE:APP if the file declares both."
        )
    if address is not None:
        app.use_log(address)
    return app


@click.command()
@edited_app_options
@from_option
@json_option
@click.pass_context
def plan(
    context: click.Context,
    file: str,
    name: str | None,
    *,
    address: Path | str | None,
    same_expressions: bool,
    starts: tuple[str, ...],
    as_json: bool,
) -> None:
    """Show what the app in FILE, as it is now, would do to the state that it has.

    For each stateful step and each output: whether it keeps what there is, is rebuilt from the log, is
    dropped, or refuses; why; how many records are read again, and how long that takes. It changes nothing, and
    the app may run meanwhile.

    The exit code is 0 if everything keeps, 3 if something is rebuilt or dropped, 4 if it is
    refused, and 5 if a rebuild needs records that the log no longer holds, or that compaction may have removed;
    1 and 2 are errors.

    \b
    Examples:
      millstream plan app.py
      millstream plan app.py --json
      millstream plan app_folder.py:billing && millstream run app_folder.py:billing
    """
    from millstream.ops.plan import plan_change
    from millstream.ops.replay_start import ReplayStart

    start = ReplayStart.parse(starts)
    app = edited_app(file, name, address)
    found = plan_change(app, same_expressions=same_expressions, start=start)
    if as_json:
        print_json(found.to_dict())
    else:
        print_plan(found)
    context.exit(found.exit_code)


def print_plan(plan: ChangePlan, *, advice: bool = True) -> None:
    """Print a plan for people: part by part; with ``advice`` then what it costs and what to do next."""
    if plan.boundary is None:
        _print_first_run(plan)
        return
    rows = {one.view: one.rows for one in plan.filled}
    tables = {one.step: one.rows for one in plan.tables}
    for part in plan.change.parts:
        _print_part(part)
        if part.filled_from is not None:
            filled = pluralize(rows.get(part.name, 0), "row")
            click.echo(f"{'':<10}  filled from view {part.filled_from!r}: {filled}")
        if part.filled_from_table is not None:
            click.echo(f"{'':<10}  filled from table {part.filled_from_table!r}: 0 records read")
        if part.filled_from_steps:
            named = ", ".join(
                f"{step!r} (up to {pluralize(tables.get(step, 0), 'row')})"
                for step in part.filled_from_steps
            )
            click.echo(f"{'':<10}  filled from the state of {named}: 0 records read")
    for refusal in plan.change.refusals:
        click.echo(f"{click.style('refuses', fg='red')}   the app: {refusal}")
    for sentence in _sentences(plan) if advice else ():
        click.echo(sentence)
    if advice and plan.kept_until is not None:
        click.echo(kept_sentence(plan.kept_until))


def _print_first_run(plan: ChangePlan) -> None:
    click.echo(f"{plan.app} has no state yet: its first run reads the log from its start.")
    for topic, start in plan.began.items():
        click.echo(f"But for {topic}, which it reads from {start}.")


def _print_part(part: PartChange) -> None:
    verdict = click.style(f"{part.verdict:<9}", fg=_COLORS[part.verdict])
    was = f" (was {part.was!r})" if part.was is not None else ""
    click.echo(f"{verdict} {part.kind} {part.name!r}{was}")
    for why in part.why:
        click.echo(f"{'':<10}  {why}")


def _sentences(plan: ChangePlan) -> list[str]:
    """Say where the app began, what a rebuild costs, and what to do next."""
    began = [f"It began to read {topic} at {start}." for topic, start in plan.began.items()]
    return [*began, *_advice(plan)]


def _advice(plan: ChangePlan) -> list[str]:
    if plan.verdict == "keeps":
        return ["A run resumes where the last one stopped."]
    if plan.verdict == "refuses":
        return [_REFUSED.format(app=plan.app)]
    return [*_read_again(plan), _FILL_ADVICE if plan.change.only_fills_new else _ADVICE]


_REFUSED = (
    "A run is refused, and nothing of {app} changes. Undo what is refused, or give the app another name to build "
    "its state from the log, beside the old."
)
_FILL_ADVICE = (
    "millstream run fills what is new before it begins, and millstream deploy does so by itself. What runs until then is kept to go "
    "back to, instead of an earlier version. A program that calls run() itself is refused until it is deployed, or a new view is "
    "written from there on."
)
_ADVICE = (
    "A run is refused until then. millstream deploy computes what is rebuilt beside the app, and puts it in place; "
    "all else keeps its state. Or undo the change."
)


def _read_again(plan: ChangePlan) -> list[str]:
    if plan.verdict != "rebuilds":
        return []
    if not any(part.is_computed for part in plan.change.parts):
        return ["No record is read again."]
    ranges = ", ".join(
        f"{one.topic}/{one.partition} [{one.start}, {one.end})" for one in plan.replays
    )
    sentences = [f"Read again: {pluralize(plan.records, 'record')} ({ranges or 'none'})."]
    if plan.seconds is None:
        sentences.append("How long that takes is not known: no batch of the app was measured yet.")
    else:
        about = format_us(max(1, round(plan.seconds)) * 1_000_000)
        speed = f"{plan.records_per_s:,.0f} records a second, the speed of its largest batch"
        sentences.append(f"That takes about {about}, at {speed}.")
    sentences += [
        f"The step {step!r} asks its service again, which may give other answers than it gave then: --ask-again confirms "
        "it."
        for step in plan.asking
    ]
    if plan.gone:
        sentences.append(
            f"The log no longer holds {pluralize(plan.gone, 'record')} before these: what is rebuilt lacks them."
        )
    sentences += [
        f"The topic {topic!r} is compacted: what is rebuilt lacks the records that compaction has removed."
        for topic in plan.compacted_topics
    ]
    return sentences
