"""Karapace, a schema registry that others wrote, for a test: on a free port, with its schemas in a topic of a broker.

It fixes the versions of its libraries, so it is installed into an environment of its own, whose Python is named by
MILLSTREAM_TEST_KARAPACE: ``python -m venv k && k/bin/pip install karapace``.
"""

import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest

from millstream.testing.free_ports import free_ports

VARIABLE = "MILLSTREAM_TEST_KARAPACE"
_START_S = 300


class Karapace:
    """A registry at ``url``."""

    def __init__(self, url):
        self.url = url

    def add(self, subject, schema, kind="AVRO", references=()):
        """Register a schema, and return its number. A reference is a name and a subject, of the version 1."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        said = {"schema": text, "schemaType": kind}
        if references:
            said["references"] = [
                {"name": name, "subject": of, "version": 1} for name, of in references
            ]
        request = urllib.request.Request(
            f"{self.url}/subjects/{subject}/versions",
            json.dumps(said).encode(),
            {"Content-Type": "application/vnd.schemaregistry.v1+json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)["id"]


@contextmanager
def serving(broker, folder):
    """Start Karapace beside a broker; where it is not installed, the test is skipped."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"Karapace is not installed, or {VARIABLE} does not name its Python")
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    settings = {
        "KARAPACE_BOOTSTRAP_URI": broker,
        "KARAPACE_HOST": "127.0.0.1",
        "KARAPACE_PORT": str(port),
        "KARAPACE_ADVERTISED_HOSTNAME": "127.0.0.1",
        "KARAPACE_KARAPACE_REGISTRY": "true",
        "KARAPACE_WAITING_TIME_BEFORE_ACTING_AS_MASTER_MS": "100",
        "KARAPACE_LOG_LEVEL": "WARNING",
    }
    with (folder / "karapace.log").open("wb") as log:
        process = subprocess.Popen(
            [python, "-m", "karapace"],
            cwd=folder,
            env={**os.environ, **settings},
            stdout=log,
            stderr=log,
        )
    try:
        _wait_until_it_writes(process, url, folder)
        yield Karapace(url)
    finally:
        process.terminate()
        process.wait()


def _wait_until_it_writes(process, url, folder):
    end = time.monotonic() + _START_S
    while time.monotonic() < end and process.poll() is None:
        try:
            Karapace(url).add("probe", '"string"')
        except (OSError, urllib.error.HTTPError):
            time.sleep(0.2)
        else:
            return
    raise AssertionError((folder / "karapace.log").read_text(errors="replace")[-3000:])
