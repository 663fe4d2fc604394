"""The help of every command: it opens with a sentence, and examples stand line by line."""

import click
import pytest
from click.testing import CliRunner

from millstream.cli.main import millstream


def paths(group, above=()):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        yield (*above, name)
        if isinstance(command, click.Group):
            yield from paths(command, (*above, name))


@pytest.mark.parametrize("path", list(paths(millstream)), ids=" ".join)
def test_help_opens_with_a_sentence_and_shows_examples_as_lines(path):
    shown = CliRunner().invoke(millstream, [*path, "--help"], prog_name="millstream")
    assert shown.exit_code == 0
    assert "\\b" not in shown.output
    usage, sentence, *_ = shown.output.split("\n\n")
    assert usage.startswith(f"Usage: millstream {' '.join(path)}")
    assert sentence.strip().endswith((".", ":"))
    for line in shown.output.splitlines():
        assert not line.strip().startswith("Example") or line.strip() in ("Example:", "Examples:")
