"""Spark's settings on a command line: a file as spark-submit reads it, and pairs that override it."""

import pytest

from millstream.cli.spark_settings import spark_settings
from millstream.errors import ConfigError

FILE = """
# executors
spark.executor.cores   2
spark.executor.memory = 2g

! where
spark.kubernetes.container.image:registry.example.org:5000/streams:1.0
spark.executor.extraJavaOptions -Da=b -Dc=d
spark.kubernetes.namespace
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "spark.properties"
    path.write_text(FILE.rpartition("spark.kubernetes.namespace")[0])
    return path


def test_the_first_space_or_sign_ends_a_name_and_comments_are_none(file):
    assert spark_settings(file, ()) == {
        "spark.executor.cores": "2",
        "spark.executor.memory": "2g",
        "spark.kubernetes.container.image": "registry.example.org:5000/streams:1.0",
        "spark.executor.extraJavaOptions": "-Da=b -Dc=d",
    }


def test_a_pair_overrides_the_file_and_a_later_pair_an_earlier_one(file):
    pairs = ("spark.executor.cores=3", "spark.a=b=c", "spark.executor.cores=4")
    found = spark_settings(file, pairs)
    assert (found["spark.executor.cores"], found["spark.a"]) == ("4", "b=c")
    assert found["spark.executor.memory"] == "2g"


def test_without_a_file_and_pairs_there_are_no_settings():
    assert spark_settings(None, ()) == {}


def test_a_name_without_a_value_is_refused_with_its_line(file):
    file.write_text(FILE)
    with pytest.raises(ConfigError, match=r"line 9 of .*is 'spark.kubernetes.namespace'; give"):
        spark_settings(file, ())


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        ("spark.executor.cores", "--conf is 'spark.executor.cores'; give NAME=VALUE"),
        ("executor.cores=2", "names of Spark's settings begin with spark"),
        ("spark.master=yarn", "sets spark.master, which is --master here"),
        ("spark.app.name=a", "which is the app's own name here"),
    ],
)
def test_a_pair_that_is_no_setting_of_the_users_is_refused(pair, said):
    with pytest.raises(ConfigError, match=said):
        spark_settings(None, (pair,))


def test_a_file_that_is_not_there_or_no_text_is_told(tmp_path):
    with pytest.raises(ConfigError, match=r"--properties-file .*no.properties can't be read"):
        spark_settings(tmp_path / "no.properties", ())
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="Give a text file"):
        spark_settings(tmp_path / "bytes", ())
