"""A broker of MQTT (mosquitto) for a test: in a folder of its own, on a free port, which keeps sessions in a file."""

import shutil
import signal
import socket
import subprocess
import time

import pytest

from millstream.testing.free_ports import free_ports

_SETTINGS = """
listener {port} 127.0.0.1
allow_anonymous true
user root
persistence true
persistence_location {folder}/
max_queued_messages 0
"""


class MqttServer:
    """Use it in ``with``. ``kill`` ends it as its administrator does, ``start`` starts it again with the sessions that it had."""

    def __init__(self, folder):
        self.folder, self.port = folder, free_ports(1)[0]
        self.url = f"mqtt://127.0.0.1:{self.port}"
        (folder / "mosquitto.conf").write_text(_SETTINGS.format(port=self.port, folder=folder))
        self.start()

    def start(self):
        program = shutil.which(
            "mosquitto", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"
        )
        self.process = subprocess.Popen(
            [program, "-c", self.folder / "mosquitto.conf"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=5).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        raise AssertionError("mosquitto did not start")

    def publish(self, messages):
        """Publish messages, and return when the broker has acknowledged them."""
        import paho.mqtt.client as paho
        from paho.mqtt.enums import CallbackAPIVersion

        client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
        client.connect("127.0.0.1", self.port)
        client.loop_start()
        try:
            for sent in [client.publish(topic, value, qos=1) for topic, value in messages]:
                sent.wait_for_publish(60)
                assert sent.is_published()
        finally:
            client.disconnect()
            client.loop_stop()

    def kill(self):
        self.process.send_signal(signal.SIGTERM)  # only then are sessions written
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def start(folder):
    """Return a server; where there is none, the test is skipped."""
    pytest.importorskip("paho.mqtt", reason="the client of MQTT is not installed here")
    if not shutil.which("mosquitto", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin"):
        pytest.skip("mosquitto is not installed: on Debian and Ubuntu, apt-get install mosquitto")
    return MqttServer(folder)
