"""What the site has: its navigation, the reference made of docstrings and of `--help`, and `llms.txt`.

Three things are added to the pages of the repository while they are read, and are in no file: the tables of
contents, the entries of the public names, and those of the commands.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

import millstream
from millstream import testing
from millstream.cli.main import COMMANDS
from millstream.cli.main import millstream as command_group

ROOT = Path(__file__).resolve().parents[1]
HOME = "docs/index"

# The captions of the navigation, with the pages below each.
NAVIGATION: dict[str, list[str]] = {
    "Start": [
        "docs/guide/install",
        "docs/guide/tutorial",
        "README",
        "docs/demo",
        "docs/dev",
        "docs/notebooks",
    ],
    "Concepts": [
        "docs/guide/time",
        "docs/guide/effectively-once",
        "docs/concepts",
        "docs/glossary",
        "docs/architecture",
    ],
    "How to": [
        "docs/guide/sessions",
        "docs/guide/duplicates",
        "docs/guide/enrichment",
        "docs/guide/alerts",
        "docs/guide/positions",
        "docs/guide/backfill",
        "docs/testing",
        "docs/guide/deployment",
        "docs/guide/upgrade",
        "docs/guide/backup",
        "docs/guide/security",
        "docs/guide/sizing",
    ],
    "Coming from": [
        "docs/guide/from-flink",
        "docs/guide/from-kafka-streams",
        "docs/guide/from-spark",
        "docs/guide/from-bytewax",
        "docs/guide/from-pathway",
        "docs/guide/from-pandas",
    ],
    "The log": [
        "docs/log",
        "docs/kafka",
        "docs/broker",
        "docs/compatibility",
        "docs/edge",
        "docs/archive",
        "docs/log-contract",
        "docs/log-format",
        "docs/fault-cases",
    ],
    "Pipelines": [
        "docs/schemas",
        "docs/types",
        "docs/windows",
        "docs/semantics-cases",
        "docs/joins",
        "docs/deduplication",
        "docs/patterns",
        "docs/process",
        "docs/stored-searches",
        "docs/results",
        "docs/views",
        "docs/ask",
        "docs/sql",
        "docs/sourcing",
    ],
    "Databases": [
        "docs/capture",
        "docs/capture-mysql",
        "docs/capture-mongodb",
        "docs/capture-sqlite",
        "docs/capture-debezium",
        "docs/connectors",
        "docs/apply",
    ],
    "Operation": [
        "docs/change",
        "docs/operate",
        "docs/watch",
        "docs/metrics",
        "docs/cluster",
        "docs/soak",
    ],
    "Reference": [
        "docs/reference/app",
        "docs/reference/operators",
        "docs/reference/aggregates",
        "docs/reference/log",
        "docs/reference/views",
        "docs/reference/databases",
        "docs/reference/sourcing",
        "docs/reference/testing",
        "docs/reference/errors",
        "docs/reference/commands",
    ],
    "Project": [
        "CHANGELOG",
        "CONTRIBUTING",
        "docs/decisions/README",
        "benchmarks/results",
        "benchmarks/README",
    ],
}

# Pages that the navigation names otherwise than they do themselves.
SHORT_TITLES = {"README": "Overview, and how it compares"}
# Decisions are found from their list. Among the results of a search they would stand before what a user looks for.
BESIDE = "---\norphan: true\nnosearch: true\n---\n"

# The public names, by the page that has their entries.
PUBLIC_NAMES: dict[str, str] = {
    "docs/reference/app": "App BackgroundRun BackgroundStatus Topic Stream Windowed Table Grouped",
    "docs/reference/operators": (
        "tumbling hopping cumulating calendar session sliding count_window once after_count "
        "watermark processing_time device_time bloom expected_loss "
        "sequence either matched PatternSequence row_pattern RowPattern variable PatternVariable classifier match_number "
        "ProcessFunction ProcessContext FrameFunction FrameContext value_state list_state map_state "
        "http_lookup sql_lookup debezium Debezium"
    ),
    "docs/reference/aggregates": (
        "aggregate UserAggregate count sum min max mean min_by max_by first last list set distinct top_k quantile "
        "quantiles stddev variance hll_sketch kll_sketch frequent_items_sketch"
    ),
    "docs/reference/log": "connect EventLog Record",
    "docs/reference/views": (
        "view View ViewPlot serve panels ask Answer StateReader dataset Dataset ForeachContext PartialOutputWarning "
        "alert tell_webhook tell_email tell_command sql SqlResult SqlError"
    ),
    "docs/reference/databases": (
        "capture Capture CaptureStatus apply Apply ApplyStatus reconcile Reconciler Reconciliation TableComparison "
        "source Source SourceStatus folder generate http_poll mqtt amqp redis_stream "
        "sink SinkRun SinkStatus to_duckdb to_email to_http to_mariadb to_opensearch to_redis"
    ),
    "docs/reference/sourcing": (
        "EventStore Decider EventTypes SourcedEvent Projection ProcessManager Send"
    ),
    "docs/reference/errors": (
        "MillstreamError ConfigError ConflictError VersionConflictError CommandRejectedError CorruptionError "
        "DeadlineError FencedError JobFailedError OffsetOutOfRangeError RetriableError UserCodeError"
    ),
}
# Objects that a public call gives, and whose names are no public ones.
RETURNED = {
    "docs/reference/log": (
        "millstream.client.producer.Producer",
        "millstream.client.consumer.Consumer",
        "millstream.client.reader.RecordReader",
    ),
}


def setup(app: Any) -> None:
    """Register with Sphinx what is done while pages are read, and at the end."""
    app.connect("source-read", _add_to_page)
    app.connect("autodoc-process-docstring", straighten)
    app.connect("build-finished", _write_beside)


def _add_to_page(_app: object, docname: str, source: list[str]) -> None:
    if docname == HOME:
        source[0] += contents()
    elif docname == "docs/reference/commands":
        source[0] += "\n".join(command_entries())
    elif docname.startswith("docs/decisions/") and docname != "docs/decisions/README":
        source[0] = BESIDE + source[0]
    else:
        source[0] += "".join(entry(name) for name in names_on(docname))


def contents() -> str:
    """Give the hidden tables of contents that the navigation is made of."""
    return "".join(
        f"\n```{{toctree}}\n:caption: {caption}\n:hidden:\n\n"
        + "".join(map(_listed, pages))
        + "```\n"
        for caption, pages in NAVIGATION.items()
    )


def _listed(page: str) -> str:
    return f"{SHORT_TITLES[page]} </{page}>\n" if page in SHORT_TITLES else f"/{page}\n"


# The reference of names.


def names_on(docname: str) -> list[str]:
    """Give the dotted names whose entries a page has."""
    public = [f"millstream.{name}" for name in PUBLIC_NAMES.get(docname, "").split()]
    kit = [f"millstream.testing.{name}" for name in testing.__all__]
    return [
        *public,
        *RETURNED.get(docname, ()),
        *(kit if docname == "docs/reference/testing" else ()),
    ]


def entry(name: str) -> str:
    """Give the directive that makes a name's entry of its docstring."""
    found = millstream
    for part in name.split(".")[1:]:
        found = getattr(found, part, None) or inspect.importlib.import_module(  # type: ignore[attr-defined]
            f"{found.__name__}.{part}"
        )
    if inspect.ismodule(found):
        kind, name, options = "automodule", found.__name__, "   :members:\n"
    elif inspect.isclass(found):
        inherited = "" if issubclass(found, BaseException) else "   :inherited-members:\n"
        kind, options = "autoclass", f"   :members:\n{inherited}"
    else:
        kind, options = "autofunction", ""
    return f"\n```{{eval-rst}}\n.. {kind}:: {name}\n{options}```\n"


def straighten(
    _app: object, what: str, _name: str, _object: object, _options: object, lines: list[str]
) -> None:
    """Put right what Google's style makes of two habits of our docstrings.

    `Guarantees: …` with its indented lines is one paragraph, and no list of definitions. And what stands before a colon in
    the first line of a property is no type.
    """
    within = False
    for number, line in enumerate(lines):
        if re.match(r"(Guarantees|Costs|Source): \S", line):
            within = True
            lines[number] = re.sub(r"^(\w+):", r"**\1:**", line)
        elif not line.startswith(" "):
            within = False
        elif within:
            lines[number] = line.lstrip()
    for line in [line for line in lines if line.startswith(":type: ")]:
        if what in ("property", "attribute"):
            lines.remove(line)
            lines[0] = f"{line.removeprefix(':type: ')}: {lines[0]}"


# The reference of commands.


def command_entries() -> Iterator[str]:
    """Give the entry of each command, as Markdown."""
    context = click.Context(command_group, info_name="millstream", **command_group.context_settings)
    for name in COMMANDS:
        command = command_group.get_command(context, name)
        assert command is not None
        yield from _command_entry(command, context, 2)


def _command_entry(command: click.Command, parent: click.Context, depth: int) -> Iterator[str]:
    context = click.Context(command, info_name=command.name, parent=parent)
    usage = " ".join(command.get_usage(context).removeprefix("Usage: ").split())
    yield f"\n{'#' * depth} {context.command_path}\n"
    yield f"```text\n{usage}\n```\n"
    yield from _help_text(command.help or "")
    options = [
        record for each in command.get_params(context) if (record := each.get_help_record(context))
    ]
    if options:
        yield "| Option | Meaning |\n|---|---|"
        yield from (f"| `{_cell(names)}` | {_escaped(_cell(told))} |" for names, told in options)
        yield ""
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            if below is not None and not below.hidden:
                yield from _command_entry(below, context, depth + 1)


def _help_text(text: str) -> Iterator[str]:
    """Give the paragraphs of a command's help; one that must keep its lines becomes a block of text."""
    for paragraph in re.split(r"\n\s*\n", inspect.cleandoc(text)):
        if paragraph.startswith("\b"):
            kept = textwrap.dedent(paragraph.removeprefix("\b").strip("\n"))
            yield f"```text\n{kept}\n```\n"
        else:
            yield f"{_escaped(' '.join(paragraph.split()))}\n"


def _escaped(text: str) -> str:
    """Keep Markdown from reading a help text as its own, but for code between backticks."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(
        part if part.startswith("`") else re.sub(r"([*_<>\[\]{}$~])", r"\\\1", part)
        for part in parts
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# What is beside the pages.


def _write_beside(app: Any, failed: Exception | None) -> None:
    """Write the first page's address, each page as Markdown, and the list of them for language models."""
    if failed or app.builder.name != "html":
        return
    out = Path(app.outdir)
    (out / "index.html").write_text(
        '<!doctype html><meta charset="utf-8"><title>Millstream</title>\n'
        f'<meta http-equiv="refresh" content="0; url={HOME}.html">\n<a href="{HOME}.html">Millstream</a>\n'
    )
    for docname in app.env.found_docs:
        target = out / f"{docname}.md"
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(page_as_markdown(docname))
    titles = {docname: title.astext() for docname, title in app.env.titles.items()}
    (out / "llms.txt").write_text(list_for_models(titles))


def page_as_markdown(docname: str) -> str:
    """Give a page as it is in the repository; that of the commands with its entries."""
    text = (ROOT / f"{docname}.md").read_text()
    if docname == "docs/reference/commands":
        return text + "\n".join(command_entries())
    if names := names_on(docname):
        return text + "\n" + "\n".join(f"- `{name}`" for name in names) + "\n"
    return text


def list_for_models(titles: dict[str, str]) -> str:
    """Give `llms.txt` (llmstxt.org): what this is, and each page with its first sentence."""
    home = (ROOT / f"{HOME}.md").read_text()
    lines = ["# Millstream", "", f"> {first_paragraph(home)}", ""]
    for caption, pages in NAVIGATION.items():
        lines += [f"## {caption}", ""]
        for page in pages:
            about = summary((ROOT / f"{page}.md").read_text())
            lines.append(f"- [{titles[page]}]({page}.md): {about}")
        lines.append("")
    return "\n".join(lines)


def summary(text: str) -> str:
    """Give the first sentence of a page, without links."""
    return re.split(r"(?<=[.!?:]) (?=[A-Z`])", first_paragraph(text))[0]


def first_paragraph(text: str) -> str:
    """Give the first paragraph of a page that is text alone, without links."""
    for paragraph in re.sub(r"(?ms)^```.*?^```$", "", text).split("\n\n"):
        words = " ".join(paragraph.split())
        if words and not re.match(r"#|\||```|!|<|>|\*(?!\*)|- ", words):
            return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", words)
    return ""
