"""The help of every command opens with a sentence, and examples stand line by line; any encoding can show what commands say."""

import os
import subprocess
import sys

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


WITHOUT_EXTRAS = """
import sys

EXTRAS = set(
    "cloudpickle confluent_kafka cryptography datasketches deltalake fastavro numba obstore opentelemetry pandas psycopg "
    "pydantic pyiceberg pymongo pymysql pyspark redis snowballstemmer starlette tantivy uvicorn".split()
)


class NotInstalled:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRAS:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, NotInstalled())
import click
from millstream.cli.main import millstream

def load(group):
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            load(command)

load(millstream)
print("all")
"""


def test_every_command_loads_where_no_extra_is_installed():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_EXTRAS], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("all\n", "")


def test_a_character_that_the_output_cannot_have_is_replaced(tmp_path):
    (tmp_path / "app.py").write_text("")
    command = "from millstream.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", command, "run", "app.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == b"loading app.py ?\n"
    assert b"declares no app" in done.stderr
    assert b"Traceback" not in done.stderr
