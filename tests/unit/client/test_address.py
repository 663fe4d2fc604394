import pytest

from millstream.client import connect
from millstream.client.address import kafka_address, shown
from millstream.client.kafka.extra import kafka_module
from millstream.errors import ConfigError, EnvironmentProblem


def test_an_address_names_brokers_options_and_patience() -> None:
    found = kafka_address("kafka://a,b:19092,[::1]:1/?sasl.password=p%40ss&timeout=1+minute")
    assert found.servers == "a:9092,b:19092,[::1]:1"
    assert found.settings == (("sasl.password", "p@ss"),)
    assert found.timeout_s == 60
    assert kafka_address("kafka://localhost").timeout_s == 10


def test_what_is_shown_of_an_address_has_no_secrets() -> None:
    text = "kafka://a:1?sasl.password=secret"
    assert shown(text) == kafka_address(text).shown == "kafka://a:1"
    assert "secret" not in repr(kafka_address(text))
    assert shown("./data") == "./data"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("kafka://", "names no broker in ''"),
        ("kafka://a:b", "names no broker in 'a:b'"),
        ("kafka://a:0", "names no broker in 'a:0'"),
        ("kafka://a:70000", "names no broker"),
        ("kafka://user:secret@a:9092", "options sasl.username and sasl.password"),
        ("kafka://a/topic", "names no broker in 'a/topic'"),
        (
            "kafka://a?linger.ms=5",
            'is \'linger.ms\'. Choose "timeout", "broker.address',
        ),
        ("kafka://a?timeout=5", "the option timeout of kafka://a"),
        ("kafka://a?client.id=b&client.id=c", "given twice"),
    ],
)
def test_a_wrong_address_is_told_with_what_is_allowed(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        connect(text)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "kafka://user:secret,word@a:9092",
        "kafka://user:secret?word@a:9092",
        "kafka://user:secret/word@a:9092",
        "kafka://user:secret",
        "kafka://a?sasl.password=half&secret",
        "kafka://a?sasl.password=half&Secret.word=other",
    ],
)
def test_a_password_that_is_not_written_as_it_should_be_is_not_shown(text: str) -> None:
    assert "secret" not in shown(text)
    if text != "kafka://user:secret":  # which names a port that is none
        with pytest.raises(ConfigError) as caught:
            kafka_address(text)
        assert "secret" not in str(caught.value).casefold()


def test_a_missing_extra_is_told_with_the_command_that_installs_it(monkeypatch) -> None:
    def absent(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="confluent_kafka")

    monkeypatch.setattr("millstream.client.kafka.extra.import_module", absent)
    with pytest.raises(
        EnvironmentProblem, match=r'kafka:// needs pip install "millstream\[kafka\]"'
    ):
        kafka_module("log")


def test_a_scheme_in_capitals_is_not_taken_for_a_folder() -> None:
    with pytest.raises(ConfigError, match="begins with 'Kafka://'; write kafka://"):
        connect("Kafka://host:9092")
