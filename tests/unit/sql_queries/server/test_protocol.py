"""Bytes that are no messages, and messages that end in the middle, end their own connection at most; others are answered."""

import socket
import struct
import time
from contextlib import suppress

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.client import connect
from millstream.sql_queries.query import scope_of
from millstream.sql_queries.server import server as sql_server
from millstream.sql_queries.server.server import serve_sql
from millstream.sql_queries.session import SqlLimits

STARTUP = b"user\0me\0database\0millstream\0\0"
WAIT_S = 60


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log")
    with connect(folder) as log:
        log.create_topic("t")
    limits = SqlLimits(seconds=120, memory_mb=128, threads=1)
    with serve_sql(scope_of(None, folder), "127.0.0.1:0", limits=limits) as serving:
        yield serving
        with psycopg.connect(serving.url, autocommit=True) as connection:  # after all of it
            assert connection.execute("SELECT count(*) FROM t").fetchone() == (0,)


def message(kind, body):
    return kind + struct.pack("!i", len(body) + 4) + body


def open_connection(server):
    connection = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
    connection.sendall(struct.pack("!ii", len(STARTUP) + 8, 196608) + STARTUP)
    received = b""
    while not received.endswith(b"Z\0\0\0\5I"):
        received += connection.recv(4096)
    return connection


def until_closed(connection):
    """Read what the server says until it closes; fail if it does not."""
    received = b""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)
    with suppress(ConnectionError):  # it may close with bytes of ours that it has not read
        while part := connection.recv(65536):
            received += part
    return received


@settings(max_examples=60)
@given(st.binary(max_size=200))
def test_bytes_instead_of_a_startup_end_the_connection(server, data):
    with socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S) as connection:
        connection.sendall(data)
        until_closed(connection)


BODIES = st.one_of(
    st.binary(max_size=40),
    st.sampled_from(
        [
            b"SELECT 1\0",
            b"s\0SELECT $1\0\0\0",
            b"\0SELECT 1\0\0\0",
            b"\0\0\0\0\0\0\0\0",
            b"\0s\0\0\1\0\1\0\1\0\0\0\1\0\0\0\0",
            b"\0\0\0\0\0",
            b"S\0",
            b"Ss\0",
            b"P\0",
        ]
    ),
)
MESSAGES = st.lists(
    st.builds(message, st.sampled_from([bytes([c]) for c in b"QPBDECSHFpdcfz\0"]), BODIES),
    max_size=8,
).map(b"".join)


@settings(max_examples=25)
@given(MESSAGES, st.integers(0, 60))
def test_messages_that_make_no_sense_or_end_early_hang_nothing(server, data, cut):
    with open_connection(server) as connection:
        connection.sendall(data[: len(data) - cut] if cut < len(data) else data)
        until_closed(connection)


def test_after_an_error_the_next_messages_are_skipped_until_sync(server):
    with open_connection(server) as connection:
        connection.sendall(
            message(b"P", b"\0SELEC\0\0\0")
            + message(b"B", b"\0\0\0\0\0\0\0\0")
            + message(b"E", b"\0\0\0\0\0")
            + message(b"S", b"")
            + message(b"Q", b"SELECT 7\0")
        )
        received = until_closed(connection)
    assert received.count(b"C42601\0") == 1
    assert received.count(b"Z\0\0\0\5I") == 2
    assert b"\0\1\0\0\0\x017" in received


def test_a_length_that_is_too_large_is_not_waited_for(server):
    with open_connection(server) as connection:
        connection.sendall(b"Q" + struct.pack("!i", 2**31 - 1))
        assert connection.recv(100) == b""


def test_a_client_that_says_nothing_or_half_a_message_delays_nobody(server):
    silent = socket.create_connection(("127.0.0.1", server.port), timeout=WAIT_S)
    half = open_connection(server)
    half.sendall(b"Q\0\0\0")
    deaf = open_connection(server)
    deaf.sendall(message(b"Q", b"SELECT range FROM range(3000000)\0"))
    with silent, half, deaf:
        started = time.monotonic()
        with psycopg.connect(server.url, autocommit=True) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
        assert time.monotonic() - started < WAIT_S


def test_a_client_that_logs_in_byte_by_byte_has_no_more_time_than_others(server, monkeypatch):
    monkeypatch.setattr(sql_server, "_LOGIN_S", 1.0)
    with socket.create_connection(("127.0.0.1", server.port), timeout=0.2) as connection:
        connection.sendall(struct.pack("!ii", 5_000, 196608))
        ended = False
        for _ in range(1_000):
            with suppress(TimeoutError):
                try:
                    connection.sendall(b"u")
                    ended = connection.recv(1) == b""
                except ConnectionError:
                    ended = True
            if ended:
                break
    assert ended
