"""A receiver of webhooks in this process: a real server that responds as configured, and keeps the requests."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Receiver:
    """Answers with what ``answer(request)`` gives: a status, or a status and headers.

    ``requests`` has what came, in order, as dictionaries of headers with ``body`` and ``at``.
    """

    def __init__(self, answer=lambda request: 200, port=0):
        self.requests = []
        self.lock = threading.Lock()
        self.came = threading.Condition(self.lock)
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self):
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                request = {name.lower(): value for name, value in self.headers.items()}
                request |= {"body": body, "path": self.path, "at": outer.clock()}
                with outer.came:
                    outer.requests.append(request)
                    outer.came.notify_all()
                answered = answer(request)
                if answered is None:
                    return  # it was killed meanwhile, or says nothing
                status, headers = answered if isinstance(answered, tuple) else (answered, {})
                text = b"as told"
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request, client_address):
                pass  # whoever sent it was killed

        self.server = Server(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}/hook?a=b"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))

    @staticmethod
    def clock():
        import time

        return time.monotonic()

    def wait(self, count, timeout_s=60):
        """Return what came once there are so many requests."""
        with self.came:
            assert self.came.wait_for(lambda: len(self.requests) >= count, timeout_s), self.requests
            return list(self.requests)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
