"""A Redis server for a test: in a folder of its own, on a free port, which keeps what it has acknowledged."""

import shutil
import socket
import subprocess
import time

import pytest

from millstream.testing.free_ports import free_ports


class RedisServer:
    """Use it in ``with``. ``kill`` ends it as a crash does, ``start`` starts it again with what it had."""

    def __init__(self, folder):
        self.folder, self.port = folder, free_ports(1)[0]
        self.url = f"redis://127.0.0.1:{self.port}"
        self.start()

    def start(self):
        options = f"--port {self.port} --bind 127.0.0.1 --dir {self.folder} --save --appendonly yes --appendfsync always"
        self.process = subprocess.Popen(
            [shutil.which("redis-server"), *options.split()], stdout=subprocess.DEVNULL
        )
        end = time.monotonic() + 60
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", self.port), timeout=5) as session:
                    session.sendall(b"PING\r\n")
                    if session.recv(100).startswith(b"+PONG"):
                        return
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError("the Redis server did not start")

    def kill(self):
        self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.kill()


def start(folder):
    """Return a server; where there is none, the test is skipped."""
    pytest.importorskip("redis", reason="the driver of Redis is not installed here")
    if shutil.which("redis-server") is None:
        pytest.skip(
            "redis-server is not installed: on Debian and Ubuntu, apt-get install redis-server"
        )
    return RedisServer(folder)
