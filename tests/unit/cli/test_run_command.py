"""`millstream run` finds the app that a file declares, and says so when there is none."""

import pytest
from click.testing import CliRunner

from millstream.cli.run import find_app, run, split_file
from millstream.errors import ConfigError

TWO = """
import millstream as ms
one = ms.App("one", log="unused")
two = ms.App("two", log="unused")
"""

TOLD = """
import millstream as ms
app = ms.App("a", log="u")
class Told(str):
    ok = True
app.run = lambda **given: Told(f"{app.log} {given['master']} {given['cores']}")
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
    with pytest.raises(
        ConfigError, match=r"none was named.*app.py:one \(the app one\), .*app.py:two"
    ):
        find_app(path, None)
    with pytest.raises(ConfigError, match="none is 'three'"):
        find_app(path, "three")


def test_a_file_without_an_app_is_told_how_to_declare_one(tmp_path):
    with pytest.raises(ConfigError, match="declares no app"):
        find_app(write(tmp_path, "x = 1\n"), None)


def test_running_the_file_does_not_run_its_main_part(tmp_path):
    text = 'import millstream as ms\napp = ms.App("a", log="u")\nif __name__ == "__main__":\n    1 / 0\n'
    assert find_app(write(tmp_path, text), None).name == "a"


def test_the_address_of_a_cluster_and_its_cores_reach_the_run(tmp_path):
    options = ["--master", "spark://host:7077", "--cores", "16"]
    shown = CliRunner().invoke(run, [str(write(tmp_path, TOLD)), *options])
    assert shown.output.splitlines()[-1] == "u spark://host:7077 16"
    assert shown.exit_code == 0


def test_settings_of_spark_reach_the_run_and_a_wrong_one_is_told_before_anything_is_loaded(
    tmp_path,
):
    app = write(tmp_path, TOLD.replace("{given['cores']}", "{given['settings']}"))
    (tmp_path / "spark.properties").write_text("spark.a 1\nspark.b 2\n")
    options = ["--properties-file", str(tmp_path / "spark.properties"), "--conf", "spark.b=3"]
    shown = CliRunner().invoke(run, [str(app), *options])
    assert shown.output.splitlines()[-1] == "u None {'spark.a': '1', 'spark.b': '3'}"
    refused = CliRunner().invoke(run, [str(app), "--conf", "cores"])
    assert isinstance(refused.exception, ConfigError)
    assert not refused.output


def test_the_first_line_comes_before_anything_is_loaded(tmp_path):
    path = write(tmp_path, "import sys\nprint('loaded')\n")
    shown = CliRunner().invoke(run, [str(path)])
    assert shown.output.splitlines()[:2] == [f"loading {path} …", "loaded"]


def test_a_log_on_the_command_line_goes_before_that_of_the_file(tmp_path):
    shown = CliRunner().invoke(run, [str(write(tmp_path, TOLD)), "--log", "other"])
    assert shown.output.splitlines()[-1] == "other None None"


def test_a_run_at_which_a_step_failed_ends_with_exit_code_1(tmp_path):
    shown = CliRunner().invoke(run, [str(write(tmp_path, TOLD.replace("ok = True", "ok = False")))])
    assert shown.exit_code == 1


def test_of_several_apps_one_is_chosen_behind_the_file_by_variable_or_name(tmp_path):
    text = TWO.replace("one = ", "first = ")
    path = write(tmp_path, text)
    for chosen, name in (("first", "one"), ("one", "one"), ("two", "two")):
        assert find_app(*split_file(f"{path}:{chosen}", None)).name == name
    with pytest.raises(ConfigError, match="Did you mean 'first'"):
        find_app(*split_file(f"{path}:frist", None))
    with pytest.raises(ConfigError, match="Give one of them"):
        split_file(f"{path}:first", "two")
    with pytest.raises(ConfigError, match="There is no file"):
        split_file(f"{tmp_path}/nope.py:first", None)


def test_two_apps_of_one_name_are_not_taken_for_one(tmp_path):
    path = write(tmp_path, TWO.replace('"two"', '"one"'))
    with pytest.raises(ConfigError, match="none was named"):
        find_app(path, None)
    with pytest.raises(ConfigError, match="not clear which one 'one' is"):
        find_app(path, "one")
    assert find_app(path, "two").name == "one"
