"""Our own connections to a broker with certificate and users."""

from __future__ import annotations

import socket
import ssl
from urllib.parse import urlencode

import pytest
from broker.broker_process import InProcess
from broker.certificates import made

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")

from millstream.broker.protocol.messages import METADATA
from millstream.broker.security import users as users_file
from millstream.broker.security.users import UsersFile
from millstream.client.address import kafka_address
from millstream.client.kafka.shared.connection import BrokerConnection
from millstream.errors import BrokerUnavailableError, ConfigError

PASSWORD = "a pässword: with = everything"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return made(tmp_path_factory.mktemp("certificate"))


@pytest.fixture
def secure(tmp_path, certificate, monkeypatch):
    monkeypatch.setattr(users_file, "_COST", 2)
    UsersFile(tmp_path / "users.txt").put("alice", PASSWORD)
    door = {
        "tls_cert": certificate.cert,
        "tls_key": certificate.key,
        "users": tmp_path / "users.txt",
    }
    with InProcess(tmp_path / "data", door=door) as running:
        yield running


def connection(broker, certificate, host="127.0.0.1", **changed):
    options = {
        "security.protocol": "sasl_ssl",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "alice",
        "sasl.password": PASSWORD,
        "ssl.ca.location": str(certificate.cert),
        **changed,
    }
    given = {name: value for name, value in options.items() if value is not None}
    address = kafka_address(f"kafka://{broker.address}?{urlencode(given)}")
    return BrokerConnection(host, broker.port, address)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"ssl.ca.location": None, "enable.ssl.certificate.verification": "false"},
        {"broker.address.family": "v4", "client.id": "ours"},
    ],
)
def test_a_client_comes_in(secure, certificate, options):
    with connection(secure, certificate, **options) as opened:
        assert opened.request(METADATA, {"topics": []})["brokers"]


def test_a_client_that_does_not_trust_the_broker_or_is_not_trusted_is_told_why(secure, certificate):
    for wrong, said in (
        ({"sasl.password": "wrong"}, r"refused the user .*sasl\.password"),
        ({"sasl.mechanism": "SCRAM-SHA-256"}, r"does not accept the SASL mechanism SCRAM-SHA-256"),
        ({"ssl.ca.location": None}, "not one to trust"),
    ):
        with pytest.raises(ConfigError, match=said):
            connection(secure, certificate, **wrong)
    with pytest.raises(BrokerUnavailableError):
        connection(secure, certificate, **{"security.protocol": "plaintext"})


def test_the_name_in_the_certificate_counts_unless_it_is_not_to(secure, certificate, monkeypatch):
    monkeypatch.setattr(
        "socket.getaddrinfo", lambda *_: [(2, 1, 6, "", ("127.0.0.1", secure.port))]
    )
    with pytest.raises(ConfigError, match="not one to trust"):
        connection(secure, certificate, host="elsewhere.example")
    any_name = {"ssl.endpoint.identification.algorithm": "none"}
    connection(secure, certificate, host="elsewhere.example", **any_name).close()


def test_the_address_in_the_certificate_is_one_without_brackets(certificate, monkeypatch):
    names = []

    def wrap_socket(_context, plain, server_hostname):
        names.append(server_hostname)
        raise OSError("seen")

    monkeypatch.setattr(ssl.SSLContext, "wrap_socket", wrap_socket)
    monkeypatch.setattr(BrokerConnection, "_connect_plain", lambda *_: socket.socket())
    address = kafka_address(
        f"kafka://[::1]:9093?security.protocol=ssl&ssl.ca.location={certificate.cert}"
    )
    with pytest.raises(BrokerUnavailableError, match=r"\[::1\]:9093 does not respond \(seen\)"):
        BrokerConnection("[::1]", 9093, address)
    assert names == ["::1"]


def test_a_name_that_no_host_can_have_is_said():
    address = kafka_address("kafka://b")
    with pytest.raises(BrokerUnavailableError, match="does not respond"):
        BrokerConnection("a" * 70, 9092, address)
