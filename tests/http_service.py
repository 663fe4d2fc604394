"""A service for tests of lookups: a real HTTP server on loopback, which counts what it is asked."""

import json
import socket
import ssl
import threading
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Asked:
    """A request as it came."""

    def __init__(self, handler, body):
        self.method, self.target = handler.command, handler.path
        self.headers, self.body = dict(handler.headers.items()), body
        self.peer = handler.client_address

    def json(self):
        return json.loads(self.body)


class Service:
    """``answer(asked, number)`` gives a status, a value (sent as JSON; bytes as they are), and headers or not."""

    def __init__(self, answer):
        self.asked, self._lock = [], threading.Lock()
        service = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 20

            def do_GET(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                asked = Asked(self, body)
                with service._lock:
                    service.asked.append(asked)
                    number = len(service.asked)
                status, value, *headers = answer(asked, number)
                data = value if isinstance(value, bytes) else json.dumps(value).encode()
                self.send_response(status)
                for name, text in {"Content-Length": len(data), **dict(*headers)}.items():
                    self.send_header(name, str(text))
                self.end_headers()
                self.wfile.write(data)

            do_POST = do_PUT = do_GET  # noqa: N815 - the base class's name

            def log_message(self, *_):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_):
                pass  # a client that left

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    @property
    def targets(self):
        return [asked.target for asked in self.asked]


@contextmanager
def serving(answer, certificate=None):
    """A service; with a certificate (its file, and that of its key), by HTTPS."""
    service = Service(answer)
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        service.server.socket = context.wrap_socket(service.server.socket, server_side=True)
        service.url = service.url.replace("http://127.0.0.1", "https://localhost")
    thread = threading.Thread(target=service.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield service
    finally:
        service.server.shutdown()
        service.server.server_close()
        thread.join()


@contextmanager
def raw_serving(talk):
    """A server that does as ``talk(connection)`` says with each connection, in a thread."""
    listener = socket.create_server(("127.0.0.1", 0))
    over, threads = threading.Event(), []

    def one(connection):
        with connection, suppress(OSError):
            talk(connection)

    def accept():
        while not over.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=one, args=(connection,), daemon=True))
            threads[-1].start()

    accepting = threading.Thread(target=accept)
    accepting.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        over.set()
        socket.create_connection(listener.getsockname()).close()
        accepting.join()
        listener.close()
        for thread in threads:
            thread.join(10)
