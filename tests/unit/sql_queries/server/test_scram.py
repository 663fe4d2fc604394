import base64
import hashlib
import hmac

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import SqlError
from millstream.sql_queries.server.scram import ScramExchange, ScramVerifier, prepared


def client_of_rfc(password, exchange, nonce="rOprNGfwEbeRWgbNEkqO"):
    """A client, written from RFC 5802, section 3: returns its last message, and the signature that it expects."""
    bare = f"n=,r={nonce}"
    server_first = exchange.first(f"n,,{bare}".encode()).decode()
    said = dict(part.split("=", 1) for part in server_first.split(","))
    salted = hashlib.pbkdf2_hmac(
        "sha256", prepared(password).encode(), base64.b64decode(said["s"]), int(said["i"])
    )
    without = f"c=biws,r={said['r']}"
    signed = f"{bare},{server_first},{without}".encode()
    key = hmac.digest(salted, b"Client Key", "sha256")
    signature = hmac.digest(hashlib.sha256(key).digest(), signed, "sha256")
    proof = bytes(a ^ b for a, b in zip(key, signature, strict=True))
    expected = hmac.digest(hmac.digest(salted, b"Server Key", "sha256"), signed, "sha256")
    return f"{without},p={base64.b64encode(proof).decode()}".encode(), base64.b64encode(expected)


@given(st.text(min_size=1, max_size=20))
def test_who_has_the_password_is_let_in_and_told_that_the_server_knows_it(password):
    exchange = ScramExchange(ScramVerifier.of(password))
    final, expected = client_of_rfc(password, exchange)
    assert exchange.final(final) == b"v=" + expected


def test_who_has_another_one_is_not():
    exchange = ScramExchange(ScramVerifier.of("the password"))
    final, _ = client_of_rfc("the passwort", exchange)
    with pytest.raises(SqlError) as refused:
        exchange.final(final)
    assert refused.value.sqlstate == "28P01"


def test_a_proof_of_another_exchange_is_worth_nothing():
    verifier = ScramVerifier.of("the password")
    final, _ = client_of_rfc("the password", ScramExchange(verifier))
    other = ScramExchange(verifier)
    client_of_rfc("the password", other)
    with pytest.raises(SqlError):
        other.final(final)


@given(st.binary(max_size=60), st.binary(max_size=60))
def test_what_is_no_message_of_scram_is_an_error(first, final):
    exchange = ScramExchange(ScramVerifier.of("the password"))
    for step, message in ((exchange.first, first), (exchange.final, final)):
        with pytest.raises(SqlError):
            step(message)
