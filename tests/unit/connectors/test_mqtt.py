"""MQTT as a source: lost sessions, refusals, and what a message becomes; on a real broker."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace

import mqtt_server
import pytest

import millstream as ms
from millstream.client import connect
from millstream.connectors.connector import BYTES_MAX
from millstream.errors import ConfigError, RetriableError


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "broker"
    folder.mkdir()
    with mqtt_server.start(folder) as started:
        yield started


def run(server, log, *topics, **options):
    connector = replace(ms.mqtt(server.url, *(topics or ("a/#",)), client="c"), **options)
    return ms.source(connector, topic="events", to=log).run(until="caught-up")


def rows(log):
    with connect(log) as opened:
        columns = ("key", "value", "headers")
        return opened.read("events", 0, columns=columns).to_pylist()


def test_a_message_is_a_record_with_its_topic_as_key(server, tmp_path):
    run(server, tmp_path / "log")
    server.publish([("a/b", b"\xff\x00"), ("b", b"of another topic"), ("a", b"")])
    run(server, tmp_path / "log")
    assert [(row["key"], row["value"]) for row in rows(tmp_path / "log")] == [
        (b"a/b", b"\xff\x00"),
        (b"a", b""),
    ]
    assert rows(tmp_path / "log")[0]["headers"] == [{"key": "mqtt-topic", "value": b"a/b"}]


def test_what_is_published_while_it_does_not_run_is_kept_by_the_broker(server, tmp_path):
    run(server, tmp_path / "log")
    server.publish([("a", str(n).encode()) for n in range(200)])
    server.kill()
    server.start()
    status = run(server, tmp_path / "log", records_max=7)
    assert not status.alarm
    assert [row["value"] for row in rows(tmp_path / "log")] == [str(n).encode() for n in range(200)]


def test_a_batch_is_bounded_by_its_bytes(server, tmp_path):
    run(server, tmp_path / "log")
    text = b"x" * (BYTES_MAX // 4)
    server.publish([("a", text)] * 10)
    reader = ms.mqtt(server.url, "a/#", client="c").open({})
    sizes = []
    while sum(sizes) < 10:
        batch = reader.read(60)
        reader.stored(batch)
        sizes.append(len(batch.values))
    reader.close()
    assert max(sizes) <= 4


def test_a_topic_that_is_not_asked_for_any_more_is_not_read(server, tmp_path):
    run(server, tmp_path / "log", "a", "b")
    run(server, tmp_path / "log", "a")  # here the session loses it
    server.publish([("b", b"2"), ("a", b"1")])
    run(server, tmp_path / "log", "a")
    assert [row["value"] for row in rows(tmp_path / "log")] == [b"1"]
    run(server, tmp_path / "log", "a", "b")
    server.publish([("b", b"3")])
    run(server, tmp_path / "log", "a", "b")
    assert [row["value"] for row in rows(tmp_path / "log")] == [b"1", b"3"]


def test_a_session_that_the_broker_lost_is_an_alarm(server, tmp_path):
    assert not run(server, tmp_path / "log").alarm
    server.kill()
    (server.folder / "mosquitto.db").unlink()
    server.start()
    assert "had no session any more" in run(server, tmp_path / "log").alarm
    assert not run(server, tmp_path / "log").alarm


def test_a_retained_message_comes_once(server, tmp_path):
    import paho.mqtt.client as paho
    from paho.mqtt.enums import CallbackAPIVersion

    client = paho.Client(CallbackAPIVersion.VERSION2)
    client.connect("127.0.0.1", server.port)
    client.loop_start()
    client.publish("a", b"kept", qos=1, retain=True).wait_for_publish(60)
    client.disconnect()
    client.loop_stop()
    for _ in range(3):
        run(server, tmp_path / "log")
    assert [row["value"] for row in rows(tmp_path / "log")] == [b"kept"]


def test_what_a_broker_refuses_is_an_error_and_one_that_is_away_is_tried_again(
    server, tmp_path, monkeypatch
):
    server.kill()
    with pytest.raises(RetriableError, match="does not respond as it should"):
        run_once(server)
    passwords = server.folder / "passwords"
    tool = shutil.which("mosquitto_passwd", path="/usr/bin:/usr/sbin:/usr/local/bin")
    subprocess.run([tool, "-c", "-b", passwords, "reader", "secret"], check=True)
    passwords.chmod(0o644)
    with (server.folder / "mosquitto.conf").open("a") as settings:
        settings.write(f"password_file {passwords}\n")
    conf = server.folder / "mosquitto.conf"
    conf.write_text(conf.read_text().replace("allow_anonymous true", "allow_anonymous false"))
    server.start()
    with pytest.raises(ConfigError, match="refuses the source: Not authorized") as raised:
        run_once(server, user="reader:wrong@")
    assert "wrong" not in str(raised.value)
    run_once(server, user="reader:secret@")
    monkeypatch.setenv("MILLSTREAM_SOURCE_PASSWORD", "wrong")
    run_once(server, user="reader:secret@")  # what is in the URL is nearer
    with pytest.raises(ConfigError, match="refuses the source"):
        run_once(server, user="reader@")
    monkeypatch.setenv("MILLSTREAM_SOURCE_PASSWORD", "secret")
    run_once(server, user="reader@")


def run_once(server, user=""):
    url = server.url.replace("mqtt://", f"mqtt://{user}")
    ms.mqtt(url, "a", client="c").open({}).close()


def test_a_password_in_a_url_is_not_shown():
    made = ms.source(ms.mqtt("mqtt://me:secret@broker.example", "a", client="c"), topic="t")
    assert "secret" not in repr(made)
