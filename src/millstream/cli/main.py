"""The ``millstream`` command: which commands there are, and how each of them ends.

A command lives in the module of its name and is imported when it is called, so that ``--help``
loads no module that it does not need. An error that Millstream raises on purpose ends as
one sentence on standard error and an exit code: 2 when the call or a setting is to be corrected, 1
for everything else. A mistake in the file of an app is shown with its place there. A traceback therefore means a defect, unless
--debug asked for it.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module

import click

from millstream import __version__
from millstream.choices import did_you_mean
from millstream.errors import ConfigError, MillstreamError

# The sentence is here too, so that the list of commands can be shown without importing them.
COMMANDS = {
    "demo": "Run a whole pipeline on data that comes with the package, and check its results.",
    "topic": "Create, list, describe, alter, archive and delete topics.",
    "produce": "Append each line of standard input to TOPIC as one record.",
    "consume": "Print the values of the records of TOPIC, one per line.",
    "group": "List, describe, reset and delete groups: how far each has read.",
    "lag": "Show how far groups are behind, and whether they are about to lose records.",
    "broker": "Serve the log in the folder DIR to Kafka's clients, until Ctrl-C or SIGTERM.",
    "capture": "Capture tables of the database at URL, and all their changes, into a log.",
    "apply": "Apply the changes of the capture NAME to the database, lake, cache or index at URL.",
    "source": "Read the files, objects, streams, messages or rows at URL into a topic.",
    "sink": "Write the records of a topic to URL.",
    "reconcile": "Compare the copy at TARGET with the database SOURCE, at one position, and repair it.",
    "edge": "Take events over HTTP and UDP, and send them out as server-sent events.",
    "webhook": "Deliver the records of TOPIC to the endpoint URL, at least once.",
    "user": "Add, list and remove the users of a broker.",
    "token": "Add, list and remove the tokens of servers.",
    "log": "Verify, repair and measure the folder of a log.",
    "ui": "Show a page of what the apps of a log do, live; serve their views over HTTP.",
    "run": "Run the pipeline that FILE declares, from where it stopped.",
    "new": "Make a project for an app called NAME: the app, its test, a Dockerfile, a CI file.",
    "dev": "Run the app in FILE while you write it: without Spark, and anew after every save.",
    "plan": "Show what the app in FILE, as it is now, would do to the state that it has.",
    "compare": "Compare the views that the edited app in FILE rebuilds with those that there are.",
    "deploy": "Put the app in FILE, as it is now, in the place of what has run.",
    "rollback": "Put the version before the last deployment back: FILE as it was then.",
    "capture-incident": "Pack a batch of the app in FILE, by default the one that failed, into a folder that is a test.",
    "stop": "Stop the running APP, as Ctrl-C in its terminal would: after the current batch.",
    "rescale": "Divide the state of APP into more or fewer buckets or partitions.",
    "reset": "Remove all that APP has made, so that its next run starts over from the log.",
    "audit": "Show who changed APP, when, how, and whether it succeeded.",
    "ledger": "Show where every event of APP went: the ledger, per batch or in total.",
    "why": "Say why a window or match is open, an event late, a job behind, a row missing, a value so.",
    "ask": "Ask the app in FILE, or whose questions are served at URL, about its state.",
    "sql": "Ask the views and topics of an app in SQL, at one position of the log.",
    "top": "Show what the apps of a log do, at a glance: how far behind, how fast, and where their time goes.",
    "alert": "Look at the figures of a log by the rules in FILE, and tell what is wrong.",
    "view": "Look at maintained views: list them, show rows, follow changes.",
    "dead": "Look at records that could not be processed, and append them again.",
    "sourcing": "Check what is kept beside the events of an event store.",
    "bloom": "Show how many events Bloom filters lose, for a memory, a rate and a horizon.",
    "executor": "Become an executor of Spark's, in a pod that Spark on Kubernetes has created.",
    "docs": "Serve the documentation of this version, with its search, from the package itself.",
    "doctor": "Check that this machine has what Millstream needs.",
}
EXIT_FAILED = 1
EXIT_USAGE_ERROR = 2
EXIT_INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            if near := did_you_mean(cmd_name, COMMANDS):
                ctx.fail(f"No such command {cmd_name!r}.{near}")
            return None
        name = cmd_name.replace("-", "_")
        command = getattr(import_module(f"millstream.cli.{name}"), name)
        assert isinstance(command, click.Command), f"millstream.cli.{name}.{name}"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="millstream")
@click.option("--debug", is_flag=True, help="With an error, show Python's whole traceback, too.")
@click.pass_context
def millstream(context: click.Context, *, debug: bool) -> None:
    """Keep a durable event log, and process streams over it.

    The log is a folder. `millstream COMMAND --help` describes a command.
    """
    if isinstance(context.obj, _Invocation):
        context.obj.debug = debug


@dataclass
class _Invocation:
    """What the options in front of a command say."""

    debug: bool = False


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; print an error of ours as one sentence."""
    asked = _Invocation()
    try:
        code = millstream.main(
            list(arguments), prog_name="millstream", standalone_mode=False, obj=asked
        )
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    except MillstreamError as error:
        from millstream.cli.log_format import print_error

        print_error(error, debug=asked.debug)
        return EXIT_USAGE_ERROR if isinstance(error, ConfigError) else EXIT_FAILED
    return code if isinstance(code, int) else 0


def main() -> None:
    """Enter here from the shell."""
    _replace_what_cannot_be_shown()
    _warn_of_written_secrets(sys.argv[1:])
    sys.exit(run(sys.argv[1:]))


def _warn_of_written_secrets(arguments: Sequence[str]) -> None:
    """Warn of a password on the command line: every user of the machine can see that, also afterwards in a history."""
    if not any("://" in argument for argument in arguments):
        return
    from millstream.access.secret_values import has_written_secret

    for number, argument in enumerate(arguments, 1):
        if has_written_secret(argument):
            click.echo(
                f"Warning: argument {number} has a password, which every user of this machine can see (ps). Write "
                "${env:NAME} or ${file:/path} in its place, in single quotes.",
                err=True,
            )


def _replace_what_cannot_be_shown() -> None:
    """Show "?" for a character that the encoding of the output lacks: a command has not failed because of it."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")
