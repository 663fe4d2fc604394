"""A broker of AMQP (RabbitMQ) for tests: in a folder of its own, on free ports of the loopback, with files that a kill leaves.

What Debian's package has is used, and not the server that it starts: the scripts below ``/usr/lib/rabbitmq``, or the one that
the variable MILLSTREAM_RABBITMQ names.
"""

import os
import shutil
import signal
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.testing.free_ports import free_ports

HOW_TO_GET_IT = (
    "rabbitmq-server is not installed: on Debian and Ubuntu, apt-get install rabbitmq-server"
)
_START_S = 280.0
_ERLANG = "/usr/lib/erlang"
_SETTINGS = """
listeners.tcp.1 = 127.0.0.1:{port}
loopback_users = none
log.console = false
disk_free_limit.absolute = 50MB
vm_memory_high_watermark.absolute = 512MB
"""
_TLS = """
listeners.ssl.1 = 127.0.0.1:{port}
ssl_options.certfile = {folder}/server.crt
ssl_options.keyfile = {folder}/server.key
"""


class RabbitServer:
    """Use it in ``with``. ``kill`` ends it as a power failure does, ``start`` starts it again with the files that it had."""

    def __init__(self, folder, certificate=None):
        self.folder = folder
        self.port, self.tls_port, self._node_port, self._names_port = free_ports(4)
        self.url = f"amqp://127.0.0.1:{self.port}"
        settings = _SETTINGS.format(port=self.port)
        if certificate is not None:
            certificate(folder)
            settings += _TLS.format(port=self.tls_port, folder=folder)
        (folder / "rabbitmq.conf").write_text(settings)
        (folder / "plugins").write_text("[].")
        (folder / "env.conf").touch()
        self._names = self._process = None

    def start(self):
        if self._names is None:
            self._names = self._run([self._erlang("epmd")])
        self._process = self._run([program()])
        end_s = time.monotonic() + _START_S
        while time.monotonic() < end_s:
            assert self._process.poll() is None, (self.folder / "said").read_text()
            try:
                self.connection().close()
            except Exception:  # noqa: BLE001 - whatever pika makes of a server that begins
                time.sleep(0.2)
            else:
                return
        raise AssertionError("RabbitMQ did not start")

    def kill(self):
        if self._process is not None:
            # The script waits for the server, which is another process of its group.
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None

    def connection(self, **options):
        import pika

        given = {"socket_timeout": 60, "stack_timeout": 60, **options}
        return pika.BlockingConnection(
            pika.ConnectionParameters("127.0.0.1", self.port, heartbeat=0, **given)
        )

    @contextmanager
    def channel(self, **options):
        connection = self.connection(**options)
        try:
            yield connection.channel()
        finally:
            if connection.is_open:
                connection.close()

    def publish(self, queue, messages, exchange=""):
        """Publish messages, each bytes or bytes and properties; return when the broker has them on its disk."""
        import pika

        with self.channel() as channel:
            channel.confirm_delivery()
            for message in messages:
                body, given = (message, {}) if isinstance(message, bytes) else message
                properties = pika.BasicProperties(delivery_mode=2, **given)
                channel.basic_publish(exchange, queue, body, properties, mandatory=True)

    def _erlang(self, name):
        path = os.pathsep.join([os.environ.get("PATH", ""), f"{_ERLANG}/bin", "/usr/bin"])
        return shutil.which(name, path=path)

    def _run(self, command):
        folder = self.folder
        env = {
            **os.environ,
            "HOME": str(folder),  # where Erlang keeps its cookie
            "ERL_EPMD_PORT": str(self._names_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": "test@localhost",
            "RABBITMQ_DIST_PORT": str(self._node_port),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
            "RABBITMQ_MNESIA_BASE": str(folder / "db"),
            "RABBITMQ_LOG_BASE": str(folder / "log"),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "env.conf"),
        }
        with (folder / "said").open("ab") as said:
            return subprocess.Popen(
                command, env=env, stdout=said, stderr=said, cwd=folder, start_new_session=True
            )

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.kill()
        if self._names is not None:
            self._names.kill()
            self._names.wait()


def program():
    """Return the script that starts the server; None if it is not there."""
    given = os.environ.get("MILLSTREAM_RABBITMQ")
    found = given or "/usr/lib/rabbitmq/bin/rabbitmq-server"
    return found if Path(found).exists() else None


def start(folder, certificate=None):
    """Return a server; where there is none, the test is skipped."""
    pytest.importorskip("pika", reason="the client of AMQP is not installed here")
    if program() is None:
        pytest.skip(HOW_TO_GET_IT)
    return RabbitServer(folder, certificate)
