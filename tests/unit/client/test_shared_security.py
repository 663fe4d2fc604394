"""SASL as our own connections to brokers speak it."""

from __future__ import annotations

import ssl

import pytest

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")

import millstream as ms
from millstream.client.address import kafka_address
from millstream.client.kafka.shared.security import (
    sasl_exchange,
    scram,
    tls_context,
    unsupported_mechanism,
)
from millstream.errors import ConfigError

# RFC 7677, section 3; RFC 5802 has no example with SHA-512.
NONCE = "rOprNGfwEbeRWgbNEkqO"
SERVER_FIRST = (
    b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
)
CLIENT_FINAL = (
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
    b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="


def begun(user="user", password="pencil"):
    exchange = scram("sha256", user, password, nonce=lambda: NONCE)
    return exchange, next(exchange)


def test_scram_says_what_the_rfc_says():
    exchange, first = begun()
    assert first == b"n,,n=user,r=" + NONCE.encode()
    assert exchange.send(SERVER_FIRST) == CLIENT_FINAL
    with pytest.raises(StopIteration):
        exchange.send(SERVER_FINAL)


def test_scram_writes_names_so_that_they_can_be_told_from_fields():
    assert begun("a=b,c")[1] == b"n,,n=a=3Db=2Cc,r=" + NONCE.encode()


@pytest.mark.parametrize(
    ("first", "final", "said"),
    [
        (b"r=another,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096", None, "not one to this client"),
        (SERVER_FIRST.replace(b"4096", b"4095"), None, "asks for 4,095 iterations"),
        (SERVER_FIRST.replace(b"4096", b"99999999"), None, "asks for 99,999,999 iterations"),
        (SERVER_FIRST.replace(b"4096", b"x"), None, "asks for 0 iterations"),
        (SERVER_FIRST, b"v=AAAA", "could not show"),
        (SERVER_FIRST, b"e=other-error", "could not show"),
    ],
)
def test_a_server_that_does_not_know_the_password_is_refused(first, final, said):
    exchange, _ = begun()
    with pytest.raises(ConfigError, match=said):
        exchange.send(first)
        exchange.send(final)


def test_plain_sends_name_and_password():
    address = kafka_address(
        "kafka://b:9092?security.protocol=SASL_SSL&sasl.mechanism=plain&sasl.username=ä&sasl.password=p"
    )
    mechanism, exchange = sasl_exchange(address)
    assert (mechanism, next(exchange)) == ("PLAIN", "\0ä\0p".encode())
    assert unsupported_mechanism(address) is None


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"security\.protocol of kafka://b:9092 is 'tls'"):
        tls_context(kafka_address("kafka://b?security.protocol=tls"))
    missing = tmp_path / "missing.pem"
    with pytest.raises(ConfigError, match="cannot be read here"):
        tls_context(kafka_address(f"kafka://b?security.protocol=ssl&ssl.ca.location={missing}"))
    oauth = kafka_address("kafka://b?security.protocol=sasl_ssl&sasl.mechanism=OAUTHBEARER")
    assert unsupported_mechanism(oauth) == "OAUTHBEARER"
    with pytest.raises(ConfigError, match="OAUTHBEARER; choose"):
        sasl_exchange(oauth)
    assert sasl_exchange(kafka_address("kafka://b")) is None
    assert tls_context(kafka_address("kafka://b")) is None


def test_an_authority_without_the_extensions_of_rfc_5280_is_taken(monkeypatch):
    """As by the client library: Python 3.13 asks for them by default."""
    real = ssl.create_default_context

    def strict(**given):
        context = real(**given)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", strict)
    context = tls_context(kafka_address("kafka://b?security.protocol=ssl"))
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert not context.verify_flags & ssl.VERIFY_X509_STRICT


@pytest.mark.parametrize(
    ("option", "named"), [("", "GSSAPI, its default"), ("&sasl.mechanism=GSSAPI", "GSSAPI,")]
)
def test_kerberos_which_the_client_library_lacks_is_told_at_once(option, named):
    with pytest.raises(ConfigError, match=rf"sasl\.mechanism of .* is {named}.*SCRAM-SHA-256"):
        ms.connect(f"kafka://127.0.0.1:1?security.protocol=sasl_plaintext{option}")
