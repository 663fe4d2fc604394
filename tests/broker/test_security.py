"""Clients that come by TLS and say who they are; those that do not; and what is said too early."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
import ssl
import struct
import subprocess
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from urllib.parse import urlencode

import aiokafka
import pytest
from broker.broker_process import MILLSTREAM, WAIT_S, AsProcess, InProcess
from broker.certificates import Certificate, made
from broker.raw_client import RawClient, batch, create, fetch, produce, produced
from kafka import KafkaConsumer, KafkaProducer
from kafka.errors import KafkaError as PythonKafkaError

import millstream as ms
from millstream.broker import connection
from millstream.broker.protocol.error_codes import ErrorCode
from millstream.broker.security import users as users_file
from millstream.broker.security.authentication import USER_FAILURES_MAX
from millstream.broker.security.users import UsersFile
from millstream.broker.server import serve
from millstream.errors import ConfigError

pytest.importorskip("confluent_kafka", reason="the extra `kafka` is not installed here")
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic

PASSWORD = "a pässword: with = everything"
OTHER = "another-password"
SILENT = {"log_level": 0}

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:kafka")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return made(tmp_path_factory.mktemp("certificate"))


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a file of users holds, with hashes that are quick: others are slow on purpose."""
    file = UsersFile(tmp_path_factory.mktemp("users") / "users.txt")
    with pytest.MonkeyPatch.context() as quick:
        quick.setattr(users_file, "_COST", 2)
        file.put("alice", PASSWORD)
        file.put("bob", OTHER)
    return file.path.read_text()


@pytest.fixture
def users(tmp_path: Path, hashed: str) -> UsersFile:
    path = tmp_path / "users.txt"
    path.write_text(hashed)
    return UsersFile(path)


@pytest.fixture(scope="module")
def secure(
    tmp_path_factory: pytest.TempPathFactory, certificate: Certificate, hashed: str
) -> Iterator[InProcess]:
    """A broker with TLS and users, which all these tests share."""
    folder = tmp_path_factory.mktemp("secure")
    (folder / "users.txt").write_text(hashed)
    door = {
        "tls_cert": certificate.cert,
        "tls_key": certificate.key,
        "users": folder / "users.txt",
    }
    with InProcess(folder / "data", door=door, rebalance_delay_ms=0, auto_create=True) as running:
        yield running


@pytest.fixture
def secured(folder: Path, users: UsersFile) -> Iterator[InProcess]:
    """A broker with users and without TLS: what passes can be said byte by byte."""
    with InProcess(folder, door={"users": users.path}) as running:
        yield running


# -- real clients -----------------------------------------------------------------------------


def confluent(broker: InProcess, certificate: Certificate, **options: object) -> dict[str, object]:
    return {
        "bootstrap.servers": broker.address,
        "security.protocol": "SASL_SSL",
        "sasl.mechanism": "PLAIN",
        "sasl.username": "alice",
        "sasl.password": PASSWORD,
        "ssl.ca.location": str(certificate.cert),
        **SILENT,
        **{key.replace("_", "."): value for key, value in options.items()},
    }


def python(broker: InProcess, certificate: Certificate, **options: object) -> dict[str, object]:
    return {
        "bootstrap_servers": broker.address,
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "PLAIN",
        "sasl_plain_username": "alice",
        "sasl_plain_password": PASSWORD,
        "ssl_cafile": str(certificate.cert),
        **options,
    }


@pytest.mark.client("confluent-kafka")
def test_confluent_kafka_comes_with_a_password(secure, certificate) -> None:
    config = confluent(secure, certificate)
    admin = AdminClient(config)
    admin.create_topics([NewTopic("c", 1, 1)])["c"].result(WAIT_S)
    sender = Producer({**config, "compression.type": "none", "message.max.bytes": 9_000_000})
    values = [b"%d" % number * 400_000 for number in range(20)]  # records of megabytes
    for value in values:
        sender.produce("c", value)
    assert sender.flush(WAIT_S) == 0
    reader = Consumer({**config, "group.id": "g", "auto.offset.reset": "earliest"})
    reader.subscribe(["c"])
    found: list[bytes] = []
    deadline_s = time.monotonic() + WAIT_S
    while len(found) < len(values):
        assert time.monotonic() < deadline_s
        found += [one.value() for one in reader.consume(100, 0.2)]
    reader.commit(asynchronous=False)
    reader.close()
    assert found == values


@pytest.mark.client("kafka-python")
def test_kafka_python_comes_with_a_password(secure, certificate) -> None:
    with closing(KafkaProducer(**python(secure, certificate))) as sender:
        for number in range(100):
            sender.send("p", b"%d" % number)
        sender.flush(WAIT_S)
    reader = KafkaConsumer(
        "p", **python(secure, certificate), auto_offset_reset="earliest", consumer_timeout_ms=60_000
    )
    with closing(reader):
        assert [next(reader).value for _ in range(100)] == [b"%d" % n for n in range(100)]


@pytest.mark.client("aiokafka")
def test_aiokafka_comes_with_a_password(secure, certificate) -> None:
    async def both() -> bytes | None:
        config = python(secure, certificate)
        config["ssl_context"] = ssl.create_default_context(cafile=config.pop("ssl_cafile"))
        async with aiokafka.AIOKafkaProducer(**config) as sender:
            await sender.send_and_wait("a", b"1")
        async with aiokafka.AIOKafkaConsumer("a", **config, auto_offset_reset="earliest") as reader:
            return (await reader.getone()).value

    assert asyncio.run(asyncio.wait_for(both(), WAIT_S)) == b"1"


def test_our_own_client_comes_with_a_password_and_does_not_show_it(secure, certificate) -> None:
    def address(password: str) -> str:
        options = {
            "security.protocol": "SASL_SSL",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "alice",
            "sasl.password": password,
            "ssl.ca.location": str(certificate.cert),
            "timeout": "1 minute",
        }
        return f"kafka://{secure.address}?{urlencode(options)}"

    with ms.connect(address(PASSWORD)) as log:
        log.create_topic("own")
        with log.producer() as sender:
            sender.send("own", {"a": 1}).result(WAIT_S)
        with log.consumer("own", follow=False) as found:
            assert [one.json() for one in found] == [{"a": 1}]
    with pytest.raises(
        ms.ConfigError, match=r"unknown user or wrong password.*correct it"
    ) as caught:
        ms.connect(address("wrong-secret"))
    assert "wrong-secret" not in str(caught.value)


def told_of(code: int, config: dict[str, object]) -> str:
    """Return what librdkafka says of an error of this kind, when a client begins."""
    errors: list[KafkaError] = []
    client = Producer({**config, "error_cb": errors.append})
    deadline_s = time.monotonic() + WAIT_S
    while True:
        for error in errors:
            if error.code() == code:
                return error.str()
        assert time.monotonic() < deadline_s, errors
        client.poll(0.1)


@pytest.mark.client("confluent-kafka")
@pytest.mark.parametrize("wrong", [{"sasl_password": "wrong"}, {"sasl_username": "nobody"}])
def test_confluent_kafka_is_told_of_a_wrong_password(secure, certificate, wrong) -> None:
    said = told_of(KafkaError._AUTHENTICATION, confluent(secure, certificate, **wrong))
    assert "unknown user or wrong password" in said


@pytest.mark.client("kafka-python")
def test_kafka_python_is_told_of_a_wrong_password(secure, certificate) -> None:
    config = python(secure, certificate, sasl_plain_password="wrong")
    with warnings.catch_warnings():  # a client that could not begin leaves its sockets open
        warnings.simplefilter("ignore", ResourceWarning)
        with pytest.raises(PythonKafkaError, match=r"(?i)auth|no brokers|bootstrap"):
            KafkaProducer(**config, bootstrap_timeout_ms=2000)
        gc.collect()


@pytest.mark.client("confluent-kafka")
@pytest.mark.parametrize(
    "how", [{"security_protocol": "PLAINTEXT"}, {"security_protocol": "SASL_PLAINTEXT"}]
)
def test_who_comes_without_tls_gets_nothing(secure, certificate, how) -> None:
    config = confluent(secure, certificate, **how)
    with pytest.raises(KafkaException):
        AdminClient(config).list_topics(timeout=1.5)
    AdminClient(confluent(secure, certificate)).list_topics(timeout=WAIT_S)


@pytest.mark.client("confluent-kafka")
def test_who_has_no_password_gets_nothing(secure, certificate) -> None:
    with pytest.raises(KafkaException):
        AdminClient(confluent(secure, certificate, security_protocol="SSL")).list_topics(timeout=1)


@pytest.mark.client("confluent-kafka")
def test_a_certificate_that_the_client_does_not_trust_is_refused_by_it(
    secure, certificate, tmp_path
) -> None:
    other = made(tmp_path)
    config = confluent(secure, certificate, ssl_ca_location=str(other.cert))
    assert "verif" in told_of(KafkaError._SSL, config)


@pytest.mark.client("confluent-kafka")
def test_tls_without_users_asks_for_no_password(folder, certificate) -> None:
    door = {"tls_cert": certificate.cert, "tls_key": certificate.key}
    with InProcess(folder, door=door, auto_create=True) as broker:
        config = confluent(broker, certificate, security_protocol="SSL")
        sender = Producer(config)
        sender.produce("t", b"1")
        assert sender.flush(WAIT_S) == 0


def test_who_speaks_tls_to_a_broker_that_does_not_is_named_in_its_log(
    broker, certificate, caplog
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(ssl.SSLError):
        RawClient(broker.address, tls=ssl.create_default_context(cafile=certificate.cert))
    with RawClient(broker.address) as other:
        other.request("Metadata", 1, {"topics": None})
    assert "it begins with a TLS handshake, and this broker has no certificate" in caplog.text


# -- what is said before a client is known ----------------------------------------------------


def token(password: str, name: str = "alice", other: str = "") -> dict[str, bytes]:
    return {"auth_bytes": f"{other}\0{name}\0{password}".encode()}


def come(
    client: RawClient, password: str = PASSWORD, name: str = "alice", version: int = 2
) -> dict:
    assert client.request("SaslHandshake", 1, {"mechanism": "PLAIN"}) == {
        "error_code": ErrorCode.NONE,
        "mechanisms": ["PLAIN"],
    }
    return client.request("SaslAuthenticate", version, token(password, name))


@pytest.mark.parametrize("version", [0, 1, 2])
def test_an_authenticated_client_gets_responses(secured, version) -> None:
    with RawClient(secured.address) as client:
        client.request("ApiVersions", 3, {})
        response = come(client, version=version)
        assert (response["error_code"], response["error_message"]) == (ErrorCode.NONE, None)
        client.request("CreateTopics", 4, create())
        assert (
            produced(client.request("Produce", 7, produce(batch(b"x"))))["error_code"]
            == ErrorCode.NONE
        )


@pytest.mark.parametrize(
    ("name", "version", "message"),
    [
        ("Metadata", 1, {"topics": None}),
        ("Produce", 7, produce(batch(b"x"))),
        ("Fetch", 11, fetch(0)),
        ("CreateTopics", 4, create()),
        ("InitProducerId", 4, {}),
    ],
)
def test_all_else_before_that_ends_the_connection(secured, name, version, message) -> None:
    for steps in range(2):
        with RawClient(secured.address) as client:
            if steps:
                client.request("SaslHandshake", 1, {"mechanism": "PLAIN"})
            client.send(name, version, message)
            assert client.is_closed()
    with RawClient(secured.address) as client:
        come(client)
        assert client.request("Metadata", 1, {"topics": None})["topics"] == []


def test_what_is_out_of_order_is_an_error_and_the_end(secured) -> None:
    with RawClient(secured.address) as client:
        response = client.request("SaslAuthenticate", 1, token(PASSWORD))
        assert response["error_code"] == ErrorCode.ILLEGAL_SASL_STATE
        assert client.is_closed()
    with RawClient(secured.address) as client:
        client.request("SaslHandshake", 1, {"mechanism": "PLAIN"})
        again = client.request("SaslHandshake", 1, {"mechanism": "PLAIN"})
        assert again["error_code"] == ErrorCode.ILLEGAL_SASL_STATE
        assert client.is_closed()
    with RawClient(secured.address) as client:
        come(client)
        response = client.request("SaslAuthenticate", 1, token(PASSWORD))
        assert response["error_code"] == ErrorCode.ILLEGAL_SASL_STATE
        assert client.is_closed()


@pytest.mark.parametrize(
    ("version", "mechanism", "code"),
    [
        (1, "SCRAM-SHA-256", ErrorCode.UNSUPPORTED_SASL_MECHANISM),
        (1, "", ErrorCode.UNSUPPORTED_SASL_MECHANISM),
        (0, "PLAIN", ErrorCode.UNSUPPORTED_VERSION),
    ],
)
def test_another_mechanism_is_answered_with_the_one_there_is(
    secured, version, mechanism, code
) -> None:
    with RawClient(secured.address) as client:
        response = client.request("SaslHandshake", version, {"mechanism": mechanism})
        assert response == {"error_code": code, "mechanisms": ["PLAIN"]}
        assert client.is_closed()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"alice",
        b"alice\0secret",
        b"\0alice\0",
        b"\0\0secret",
        b"bob\0alice\0" + PASSWORD.encode(),  # to act as somebody else
        b"\0alice\0" + PASSWORD.encode() + b"\0",
        b"\0alice\0\xff\xfe",
    ],
)
def test_a_token_that_is_none_is_refused(secured, data) -> None:
    with RawClient(secured.address) as client:
        client.request("SaslHandshake", 1, {"mechanism": "PLAIN"})
        response = client.request("SaslAuthenticate", 1, {"auth_bytes": data})
        assert response["error_code"] == ErrorCode.SASL_AUTHENTICATION_FAILED
        assert client.is_closed()


def test_a_large_request_of_an_unknown_client_is_not_read(secured) -> None:
    with RawClient(secured.address) as client:
        client.socket.sendall(struct.pack(">i", 9000) + bytes(100))
        assert client.is_closed()


def test_who_does_not_say_who_it_is_does_not_stay(folder, users) -> None:
    with (
        InProcess(folder, door={"users": users.path}, login_s=1.5) as broker,
        RawClient(broker.address) as silent,
        RawClient(broker.address) as known,
    ):
        come(known)
        silent.request("ApiVersions", 3, {})
        assert silent.is_closed()
        assert known.request("Metadata", 1, {"topics": None})["topics"] == []


def test_too_many_wrong_tries_are_refused_whatever_comes_with_them(secured) -> None:
    """Of that user from that address only: another is not kept out by them."""

    def wrong(number: int) -> int:
        with RawClient(secured.address) as client:
            return come(client, f"wrong{number}")["error_code"]

    with ThreadPoolExecutor(USER_FAILURES_MAX) as pool:
        codes = list(pool.map(wrong, range(USER_FAILURES_MAX)))
    assert codes == [ErrorCode.SASL_AUTHENTICATION_FAILED] * USER_FAILURES_MAX
    with RawClient(secured.address) as client:
        response = come(client)
        assert response["error_code"] == ErrorCode.SASL_AUTHENTICATION_FAILED
        assert "too many failed attempts" in response["error_message"]
    with RawClient(secured.address) as client:
        assert come(client, OTHER, "bob")["error_code"] == ErrorCode.NONE


def test_users_come_and_go_while_the_broker_runs(secured, users) -> None:
    with RawClient(secured.address) as open_already:
        come(open_already)
        users.put("carol", OTHER)
        with RawClient(secured.address) as client:
            assert come(client, OTHER, "carol")["error_code"] == ErrorCode.NONE
        users.put("alice", OTHER, replace=True)
        with RawClient(secured.address) as client:
            assert come(client)["error_code"] == ErrorCode.SASL_AUTHENTICATION_FAILED
        users.remove("alice")
        with RawClient(secured.address) as client:
            assert come(client, OTHER)["error_code"] == ErrorCode.SASL_AUTHENTICATION_FAILED
        users.path.write_text("nonsense\n")
        with RawClient(secured.address) as client:
            response = come(client, OTHER, "carol")
        assert response["error_code"] == ErrorCode.SASL_AUTHENTICATION_FAILED
        assert "cannot read its users" in response["error_message"]
        assert open_already.request("Metadata", 1, {"topics": None})["topics"] == []


def test_a_broker_without_users_says_so(broker) -> None:
    with RawClient(broker.address) as client:
        response = client.request("SaslHandshake", 1, {"mechanism": "PLAIN"})
        assert response["error_code"] == ErrorCode.ILLEGAL_SASL_STATE
        response = client.request("SaslAuthenticate", 1, token(PASSWORD))
        assert "no users" in response["error_message"]
        client.request("Metadata", 1, {"topics": None})


def test_no_password_is_ever_written_down(secured, users, tmp_path, caplog) -> None:
    with caplog.at_level(logging.DEBUG):
        for name, password in (("alice", "wrong-secret"), ("secret-name", "wrong-secret")):
            with RawClient(secured.address) as client:
                come(client, password, name)
                assert client.is_closed()
        with RawClient(secured.address) as client:
            come(client)
        with RawClient(secured.address) as client:
            client.request("SaslHandshake", 1, {"mechanism": "wrong-secret"})
            client.is_closed()
    assert "authentication of user 'alice' failed" in caplog.text
    assert "authentication of an unknown user failed" in caplog.text
    for secret in (PASSWORD, "wrong-secret", "secret-name"):
        assert secret not in caplog.text
        assert secret not in users.path.read_text()


# -- how they lie on the wire -----------------------------------------------------------------


def test_who_leaves_its_answers_lying_slows_no_other_behind_tls(folder, certificate) -> None:
    door = {"tls_cert": certificate.cert, "tls_key": certificate.key}
    trust = ssl.create_default_context(cafile=certificate.cert)
    with (
        InProcess(folder, door=door, responses_bytes_max=64 << 20) as broker,
        RawClient(broker.address, tls=trust) as client,
    ):
        client.request("CreateTopics", 4, create())
        for _ in range(4):
            client.request("Produce", 7, produce(batch(bytes(4_000_000))))
        idle = [RawClient(broker.address, tls=trust, receive_bytes=4096) for _ in range(8)]
        for one in idle:
            one.send("Fetch", 11, {**fetch(0), "max_bytes": 1 << 30})
        began_s = time.monotonic()
        for _ in range(20):
            client.request("Metadata", 1, {"topics": None})
        assert time.monotonic() - began_s < 10
        for one in idle:  # each gets its whole response when it reads it
            (topic,) = one.receive()["responses"]
            assert len(topic["partitions"][0]["records"]) > 3_900_000
            one.socket.close()


def test_it_ends_in_time_while_clients_are_there(folder, certificate) -> None:
    door = {"tls_cert": certificate.cert, "tls_key": certificate.key}
    trust = ssl.create_default_context(cafile=certificate.cert)
    clients = []
    with InProcess(folder, door=door) as broker:
        clients += [RawClient(broker.address, tls=trust) for _ in range(5)]
        for one in clients:
            one.request("Metadata", 1, {"topics": None})
        began_s = time.monotonic()
    assert time.monotonic() - began_s < 30
    for one in clients:
        assert one.is_closed()
        one.socket.close()


def test_who_never_finishes_the_handshake_is_not_waited_for(folder, certificate) -> None:
    door = {"tls_cert": certificate.cert, "tls_key": certificate.key}
    with InProcess(folder, door=door, login_s=0.3) as broker, RawClient(broker.address) as silent:
        assert silent.is_closed()


def test_who_is_gone_and_reads_nothing_is_not_waited_for(certificate, monkeypatch) -> None:
    monkeypatch.setattr(connection, "TLS_ENDS_S", 0.1)
    door = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    door.load_cert_chain(certificate.cert, certificate.key)
    trust = ssl.create_default_context(cafile=certificate.cert)

    async def half_closed() -> None:
        ended = asyncio.get_running_loop().create_future()

        async def serve_one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(bytes(1 << 16))  # the socket takes a part of it
            await reader.read()
            writer.close()  # as the broker does before it waits
            await connection.end_stream(writer)
            ended.set_result(None)

        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            async with await asyncio.start_server(serve_one, sock=listener, ssl=door):
                client = await asyncio.to_thread(
                    partial(RawClient, address, tls=trust, receive_bytes=4096)
                )
                client.socket.shutdown(socket.SHUT_WR)
                await asyncio.wait_for(ended, WAIT_S)
                client.socket.close()

    asyncio.run(half_closed())


def test_who_was_refused_is_closed_when_the_broker_ends(folder, certificate) -> None:
    door = {"tls_cert": certificate.cert, "tls_key": certificate.key}
    trust = ssl.create_default_context(cafile=certificate.cert)
    with InProcess(folder, door=door, connections_max=1) as broker:
        first = RawClient(broker.address, tls=trust)
        first.request("Metadata", 1, {"topics": None})
        refused = RawClient(broker.address, tls=trust)  # it does not agree to the end
        assert refused.socket.recv(1) == b""
        first.socket.close()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        gc.collect()
    refused.socket.close()
    assert [str(one.message) for one in said if issubclass(one.category, ResourceWarning)] == []


def test_a_connection_that_has_just_begun_ends_with_the_broker(folder, monkeypatch) -> None:
    run = connection.Connection.run

    async def stopped_at_once(self: connection.Connection) -> None:
        asyncio.get_running_loop().call_soon(self.stop)
        await run(self)

    monkeypatch.setattr(connection.Connection, "run", stopped_at_once)
    with InProcess(folder, stalled_s=3600) as broker, RawClient(broker.address) as client:
        assert client.is_closed()


def test_a_certificate_is_renewed_while_the_broker_runs(
    folder, certificate, tmp_path, caplog
) -> None:
    """First only half of it, which changes nothing; then all."""
    shown = Certificate(tmp_path / "cert.pem", tmp_path / "key.pem")
    for path, source in zip(shown, certificate, strict=True):
        path.write_bytes(source.read_bytes())
    (tmp_path / "renewed").mkdir()
    renewed = made(tmp_path / "renewed")
    door = {"tls_cert": shown.cert, "tls_key": shown.key}

    def trusts(one: Certificate) -> bool:
        try:
            context = ssl.create_default_context(cafile=one.cert)
            with RawClient(broker.address, tls=context) as client:
                return client.request("Metadata", 1, {"topics": None})["topics"] == []
        except ssl.SSLCertVerificationError:
            return False

    with InProcess(folder, door=door, certificate_every_s=0.05) as broker:
        renewed.cert.replace(shown.cert)
        deadline_s = time.monotonic() + WAIT_S
        while "was not renewed" not in caplog.text:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        assert trusts(certificate)
        trusted = Certificate(tmp_path / "trusted.pem", renewed.key)
        trusted.cert.write_bytes(shown.cert.read_bytes())
        renewed.key.replace(shown.key)
        while not trusts(trusted):
            assert time.monotonic() < deadline_s
        assert not trusts(certificate)


# -- what is asked of whoever starts it -------------------------------------------------------


def test_other_machines_come_only_with_tls_and_users(tmp_path, certificate, users) -> None:
    tls = {"tls_cert": certificate.cert, "tls_key": certificate.key}
    known = {"users": users.path}

    async def refused(**door: object) -> str:
        with pytest.raises(ConfigError) as caught:
            async with serve(tmp_path / "data", listen="0.0.0.0:0", **door):
                pass
        return str(caught.value)

    assert "--tls-cert, --tls-key and --users" in asyncio.run(refused())
    assert "Give --users, listen" in asyncio.run(refused(**tls))
    assert "passwords would be sent in the clear" in asyncio.run(refused(**known))
    assert not (tmp_path / "data").exists()

    async def served(**door: object) -> str:
        async with serve(tmp_path / "data", listen="0.0.0.0:0", **door) as serving:
            return serving.host

    assert asyncio.run(served(**tls, **known)) == "0.0.0.0"
    assert asyncio.run(served(**known, insecure=True)) == "0.0.0.0"


def encrypted(certificate: Certificate, folder: Path) -> Path:
    path = folder / "encrypted.pem"
    subprocess.run(
        [
            *("openssl", "pkey", "-aes256", "-passout", "pass:secret"),
            *("-in", str(certificate.key), "-out", str(path)),
        ],
        check=True,
        capture_output=True,
    )
    return path


def test_what_cannot_be_used_is_one_sentence(tmp_path, certificate, users) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nobody yet\n")
    cert, key = certificate
    cases = [
        ({"tls_cert": tmp_path / "none.pem"}, r"none\.pem cannot be read"),
        ({"tls_cert": cert, "tls_key": tmp_path / "none.pem"}, r"none\.pem cannot be read"),
        ({"tls_cert": cert}, "cannot be used"),  # the key is not in it
        ({"tls_cert": cert, "tls_key": made_elsewhere(tmp_path)}, "belong together"),
        ({"tls_cert": cert, "tls_key": encrypted(certificate, tmp_path)}, "is encrypted"),
        ({"tls_cert": users.path, "tls_key": key}, "cannot be used"),
        ({"tls_key": key}, "--tls-cert"),
        ({"users": tmp_path / "none.txt"}, "millstream user add"),
        ({"users": empty}, "no user"),
    ]

    async def started(door: dict[str, object]) -> None:
        async with serve(tmp_path / "data", listen="127.0.0.1:0", **door):
            pass

    for door, message in cases:
        with pytest.raises(ConfigError, match=message):
            asyncio.run(started(door))


def made_elsewhere(folder: Path) -> Path:
    (folder / "elsewhere").mkdir()
    return made(folder / "elsewhere").key


def test_the_command_takes_them_and_says_so(folder, certificate, tmp_path) -> None:
    users = tmp_path / "users.txt"
    done = subprocess.run(
        [*MILLSTREAM, "user", "add", "alice", "--users", str(users), "--stdin"],
        input=PASSWORD.encode() + b"\n",
        check=True,
        capture_output=True,
        timeout=WAIT_S,
    )
    assert done.stdout.decode() == f"added user alice to {users}\n"
    options = ["--tls-cert", certificate.cert, "--tls-key", certificate.key, "--users", users]
    with AsProcess(folder, *map(str, options)) as broker:
        AdminClient(confluent(broker, certificate)).list_topics(timeout=WAIT_S)
        wrong = confluent(broker, certificate, sasl_password="wrong-secret")
        assert told_of(KafkaError._AUTHENTICATION, wrong)
        code, out, err = broker.stop()
    assert code == 0
    assert out == f"Kafka clients reach {folder} at {broker.address} by TLS (Ctrl-C ends it)\n"
    assert "authentication of user 'alice' failed" in err
    assert "secret" not in err
