"""A real Prometheus and a real Alertmanager, which tell a receiver in this process."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.request
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROGRAMS = ("prometheus", "promtool", "prometheus-alertmanager")
WAIT_S = 300


def missing():
    """Name the programs that are not here."""
    return [name for name in PROGRAMS if not shutil.which(name)]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


class Alerts:
    """What Alertmanager has told: (alert, status) in order, each change once."""

    def __init__(self):
        self.told, self._changed = [], threading.Condition()
        self._begun_s = time.monotonic()

    def add(self, content):
        with self._changed:
            for one in content["alerts"]:
                entry = one["labels"]["alertname"], one["status"]
                if entry not in self.told:
                    self.told.append(entry)
            self._changed.notify_all()

    def wait_for(self, names, status):
        """Wait until all of these are told with a status."""
        assert self._wait(names, status, WAIT_S), f"not told: {self.missing(names, status)}"

    def have_told(self, names, status, within_s):
        """Return whether all of these are told with a status, after waiting for so long at most; not for ever."""
        assert time.monotonic() - self._begun_s < WAIT_S, f"not told: {self.missing(names, status)}"
        done = self._wait(names, status, within_s)
        print(f"not told yet: {self.missing(names, status)}")
        return done

    def missing(self, names, status):
        """Return which of these are not told with a status."""
        return {(name, status) for name in names} - set(self.told)

    def _wait(self, names, status, within_s):
        with self._changed:
            return self._changed.wait_for(lambda: not self.missing(names, status), within_s)


@contextmanager
def receiver():
    """Receive what Alertmanager tells, until the block ends."""
    alerts = Alerts()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            alerts.add(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield alerts, server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def monitoring(folder, rules, ports):
    """Scrape some ports every two seconds, evaluate rules, and yield what is told."""
    with ExitStack() as stack:
        alerts, told_at = stack.enter_context(receiver())
        manager_port, manager_peer, port = free_port(), free_port(), free_port()
        (folder / "alertmanager.yml").write_text(
            f"""
route: {{receiver: here, group_wait: 0s, group_interval: 1s, repeat_interval: 1h, group_by: [alertname]}}
receivers:
  - name: here
    webhook_configs: [{{url: "http://127.0.0.1:{told_at}/", send_resolved: true}}]
"""
        )
        targets = ", ".join(f'"127.0.0.1:{one}"' for one in ports)
        (folder / "rules.yaml").write_text(rules)
        (folder / "prometheus.yml").write_text(
            f"""
global: {{scrape_interval: 2s, evaluation_interval: 1s}}
rule_files: [rules.yaml]
alerting: {{alertmanagers: [{{static_configs: [{{targets: ["127.0.0.1:{manager_port}"]}}]}}]}}
scrape_configs: [{{job_name: millstream, static_configs: [{{targets: [{targets}]}}]}}]
"""
        )
        stack.enter_context(
            program(
                "prometheus-alertmanager",
                f"--config.file={folder}/alertmanager.yml",
                f"--storage.path={folder}/alertmanager",
                f"--web.listen-address=127.0.0.1:{manager_port}",
                f"--cluster.listen-address=127.0.0.1:{manager_peer}",
                "--cluster.peer-timeout=1s",
                ready=manager_port,
            )
        )
        stack.enter_context(
            program(
                "prometheus",
                f"--config.file={folder}/prometheus.yml",
                f"--storage.tsdb.path={folder}/prometheus",
                f"--web.listen-address=127.0.0.1:{port}",
                ready=port,
            )
        )
        yield alerts, port


@contextmanager
def program(*command, ready):
    """Run a server until the block ends; wait until it is ready."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    lines = []
    reading = threading.Thread(target=lambda: lines.extend(process.stdout))
    reading.start()
    try:
        deadline_s = time.monotonic() + WAIT_S
        while True:
            assert process.poll() is None, b"".join(lines).decode()
            assert time.monotonic() < deadline_s, b"".join(lines).decode()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{ready}/-/ready", timeout=10).close()
                break
            except OSError:
                time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        process.wait()
        reading.join()
        process.stdout.close()
