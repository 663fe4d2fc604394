"""`millstream run` finds the app that a file declares, and says so when there is none."""

import pytest
from click.testing import CliRunner

from millstream.cli.run import find_app, run
from millstream.errors import ConfigError

TWO = """
import millstream as ms
one = ms.App("one", log="unused")
two = ms.App("two", log="unused")
"""


def write(tmp_path, text):
    path = tmp_path / "app.py"
    path.write_text(text)
    return path


def test_the_one_app_of_a_file_is_found(tmp_path):
    path = write(tmp_path, 'import millstream as ms\nmine = ms.App("mine", log="unused")\n')
    assert find_app(path, None).name == "mine"


def test_of_several_apps_one_is_chosen_by_name(tmp_path):
    path = write(tmp_path, TWO)
    assert find_app(path, "two").name == "two"
    with pytest.raises(ConfigError, match="declares the apps one, two; no --app was given"):
        find_app(path, None)
    with pytest.raises(ConfigError, match="--app three was given"):
        find_app(path, "three")


def test_a_file_without_an_app_is_told_how_to_declare_one(tmp_path):
    with pytest.raises(ConfigError, match="declares no app"):
        find_app(write(tmp_path, "x = 1\n"), None)


def test_running_the_file_does_not_run_its_main_part(tmp_path):
    text = 'import millstream as ms\napp = ms.App("a", log="u")\nif __name__ == "__main__":\n    1 / 0\n'
    assert find_app(write(tmp_path, text), None).name == "a"


def test_the_address_of_a_cluster_and_its_cores_reach_the_run(tmp_path):
    text = (
        'import millstream as ms\napp = ms.App("a", log="u")\n'
        "app.run = lambda **given: f\"{given['master']} {given['cores']}\"\n"
    )
    options = ["--master", "spark://host:7077", "--cores", "16"]
    shown = CliRunner().invoke(run, [str(write(tmp_path, text)), *options])
    assert shown.output == "spark://host:7077 16\n"
