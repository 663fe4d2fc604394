"""A real S3 server for tests (versitygw, a Go program), and a proxy in front of it that makes faults.

``make test`` needs neither: where there is no binary, tests that want the server are skipped, and say how
to get it. MILLSTREAM_VERSITYGW names it, if it is not on the path or in the user's cache.
"""

import os
import shutil
import socket
import socketserver
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

BINARY = "MILLSTREAM_VERSITYGW"
HOW_TO_GET_IT = (
    "no versitygw: go install github.com/versity/versitygw/cmd/versitygw@latest, then name the binary by "
    f"{BINARY}"
)
USER, SECRET = "tester", "secret-of-the-tests"
_CACHED = Path.home() / ".cache/millstream/versitygw"


def find_binary() -> str | None:
    """Return the server's path; None if there is none."""
    named = os.environ.get(BINARY) or shutil.which("versitygw")
    return named or (str(_CACHED) if _CACHED.exists() else None)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


def environment(port: int) -> dict[str, str]:
    """Return what a client of the server has in its environment."""
    return {
        "AWS_ACCESS_KEY_ID": USER,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }


@contextmanager
def s3_server(folder: Path, *buckets: str):
    """Serve folders as buckets until the block ends; give the port."""
    binary = find_binary()
    assert binary is not None
    for bucket in buckets:
        (folder / "data" / bucket).mkdir(parents=True)
    port = free_port()
    sidecar = folder / "sidecar"
    sidecar.mkdir()
    folders = ["--sidecar", str(sidecar), str(folder / "data")]
    secrets = {"ROOT_ACCESS_KEY": USER, "ROOT_SECRET_KEY": SECRET}
    with (folder / "versitygw.log").open("wb") as log:
        server = subprocess.Popen(
            [binary, "--port", f"127.0.0.1:{port}", "--health", "/health", "posix", *folders],
            env=os.environ | secrets,
            stdout=log,
            stderr=log,
        )
    try:
        _wait_until_it_answers(port, server, folder)
        yield port
    finally:
        server.terminate()
        server.wait(10)


def _wait_until_it_answers(port: int, server: subprocess.Popen, folder: Path) -> None:
    deadline = time.monotonic() + 20
    while True:
        assert server.poll() is None, (folder / "versitygw.log").read_text()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
        except urllib.error.HTTPError:
            return
        except OSError:
            assert time.monotonic() < deadline, "versitygw does not answer"
            threading.Event().wait(0.02)
        else:
            return


_ANSWERS = {
    "503": (
        b"503 Slow Down",
        b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>",
    ),
    "301": (
        b"301 Moved Permanently",
        b"<Error><Code>PermanentRedirect</Code><Message>Use another endpoint.</Message></Error>",
    ),
    "409": (
        b"409 Conflict",
        b"<Error><Code>ConditionalRequestConflict</Code><Message>Please try again.</Message></Error>",
    ),
}


def _answer(kind: str, request, incoming, client: socket.socket) -> None:
    """Answer a request as the server did not."""
    if request.expects_continue:  # or the body would not come
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    _body(request, incoming)
    status, body = _ANSWERS[kind]
    head = b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n" % (status, len(body))
    client.sendall(head if request.raw.startswith(b"HEAD ") else head + body)


@dataclass
class Fault:
    """What happens to one request.

    ``kind``: "503", "409" and "301" (answers that the server did not give); "cut upload" and "cut download" (after half of the
    body); "lost answer" (the server does it, the client does not hear of it); "slow" (it waits for
    ``seconds`` first); "silence" (for ``seconds``, then the connection ends).
    """

    kind: str
    seconds: float = 0.0


@dataclass
class FaultProxy:
    """Passes requests on to a server. ``decide(method, path)`` gives the fault of a request, or None.

    ``rewrite`` changes the head of an answer: one that leads to another server may lead to that one's proxy.
    """

    server_port: int
    decide: Callable[[str, str], Fault | None] = lambda _method, _path: None
    requests: list[tuple[str, str]] = field(default_factory=list)
    rewrite: Callable[[bytes], bytes] = lambda head: head
    port: int = 0
    _server: Any = None

    def __enter__(self) -> Self:
        proxy = self

        class Handler(socketserver.BaseRequestHandler):
            def handle(self) -> None:
                with suppress(OSError):
                    proxy._serve(self.request)

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True
            block_on_close = False
            allow_reuse_address = True

        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fail_first(self, times: int, method: str, kind: str) -> None:
        """Let the first ``times`` requests of a method fail."""
        left = [times]

        def decide(seen: str, _path: str) -> Fault | None:
            if seen != method or not left[0]:
                return None
            left[0] -= 1
            return Fault(kind, 0.1)

        self.decide = decide

    def count(self, method: str) -> int:
        return sum(each == method for each, _ in self.requests)

    def _serve(self, client: socket.socket) -> None:
        with client.makefile("rb") as incoming:
            while (request := _head(incoming)) is not None:
                method, path = request.line.split(b" ")[:2]
                self.requests.append((method.decode(), path.decode()))
                fault = self.decide(method.decode(), path.decode())
                if not self._pass_on(request, incoming, client, fault):
                    return

    def _pass_on(self, request, incoming, client: socket.socket, fault: Fault | None) -> bool:
        """Return whether the connection goes on."""
        kind = "" if fault is None else fault.kind
        if kind in _ANSWERS:
            _answer(kind, request, incoming, client)
            return True
        if fault is not None and kind in {"slow", "silence"}:
            threading.Event().wait(fault.seconds)
            if kind == "silence":
                return False
        with socket.create_connection(("127.0.0.1", self.server_port)) as upstream:
            upstream.sendall(request.raw)
            if request.expects_continue:
                client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            if kind == "cut upload":
                upstream.sendall(_half(request, incoming))
                return False
            upstream.sendall(_body(request, incoming))
            with upstream.makefile("rb") as answers:
                answer = _head(answers)
                while answer is not None and b" 100 " in answer.line:
                    answer = _head(answers)
                if answer is None:
                    return False
                body = b"" if request.raw.startswith(b"HEAD ") else _body(answer, answers)
                if kind == "lost answer":
                    return False
                head = self.rewrite(answer.raw)
                if kind == "cut download":
                    client.sendall(head + body[: len(body) // 2])
                    return False
                client.sendall(head + body)
        return True


@dataclass
class _Head:
    raw: bytes
    line: bytes
    length: int
    chunked: bool
    expects_continue: bool


def _head(stream) -> _Head | None:
    lines = []
    while (line := stream.readline()) not in (b"\r\n", b""):
        lines.append(line)
    if not lines:
        return None
    fields = dict(_field(each) for each in lines[1:])
    expects = fields.pop(b"expect", b"")
    kept = [each for each in lines if not each.lower().startswith(b"expect:")]
    return _Head(
        b"".join(kept) + b"\r\n",
        lines[0],
        int(fields.get(b"content-length", 0)),
        b"chunked" in fields.get(b"transfer-encoding", b""),
        bool(expects),
    )


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name.strip().lower(), value.strip()


def _half(head: _Head, stream) -> bytes:
    """Read half of a body, where its length is known before; else all of it, of which half is returned."""
    if not head.chunked:
        return stream.read(head.length // 2)
    body = _body(head, stream)
    return body[: len(body) // 2]


def _body(head: _Head, stream) -> bytes:
    if not head.chunked:
        return stream.read(head.length)
    parts = []
    while True:
        size = stream.readline()
        parts += [size, stream.read(int(size, 16) + 2)]
        if int(size, 16) == 0:
            return b"".join(parts)
