"""A real server of Azure's Blob protocol for tests: Azurite, Microsoft's own emulator, a program of Node.

It checks signatures and conditional puts as Azure does. MILLSTREAM_AZURITE names its program, if it is not on the path or in
the user's cache, where `make test-long` installs it.
"""

import base64
import hashlib
import hmac
import os
import shutil
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

from s3_server import free_port

BINARY = "MILLSTREAM_AZURITE"
HOW_TO_GET_IT = f"no azurite: npm install azurite, then name the program azurite-blob by {BINARY}"
ACCOUNT = "tester"
KEY = "c2VjcmV0LW9mLXRoZS10ZXN0cw=="
_CACHED = Path.home() / ".cache/millstream/azurite-3.35.0/node_modules/.bin/azurite-blob"


def find_binary() -> str | None:
    """Return the server's path; None if there is none."""
    named = os.environ.get(BINARY) or shutil.which("azurite-blob")
    return named or (str(_CACHED) if _CACHED.exists() else None)


def environment(port: int) -> dict[str, str]:
    """Return what a client of the server has in its environment."""
    return {
        "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT,
        "AZURE_STORAGE_ACCOUNT_KEY": KEY,
        "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port}/{ACCOUNT}",
    }


def create_container(port: int, name: str) -> None:
    """Make a container, by a request that is signed as the protocol's "Shared Key" says."""
    date, version = formatdate(usegmt=True), "2021-08-06"
    resource = f"/{ACCOUNT}/{ACCOUNT}/{name}\nrestype:container"
    signed = "PUT" + "\n" * 12 + f"x-ms-date:{date}\nx-ms-version:{version}\n{resource}"
    key = hmac.new(base64.b64decode(KEY), signed.encode(), hashlib.sha256).digest()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/{ACCOUNT}/{name}?restype=container",
        method="PUT",
        headers={
            "x-ms-date": date,
            "x-ms-version": version,
            "Authorization": f"SharedKey {ACCOUNT}:{base64.b64encode(key).decode()}",
        },
    )
    urllib.request.urlopen(request, timeout=30).close()


@contextmanager
def azure_server(folder: Path, container: str):
    """Serve a folder, with one container, until the block ends; give the port."""
    binary = find_binary()
    assert binary is not None
    port = free_port()
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
    quiet = ["--silent", "--disableTelemetry", "--skipApiVersionCheck"]
    with (folder / "azurite.log").open("wb") as log:
        server = subprocess.Popen(
            [binary, *options, *quiet],
            env={**os.environ, "AZURITE_ACCOUNTS": f"{ACCOUNT}:{KEY}"},
            stdout=log,
            stderr=log,
        )
    try:
        _wait_until_it_answers(port, server, folder)
        create_container(port, container)
        yield port
    finally:
        server.terminate()
        server.wait(10)


def _wait_until_it_answers(port: int, server: subprocess.Popen, folder: Path) -> None:
    deadline = time.monotonic() + 60
    while True:
        assert server.poll() is None, (folder / "azurite.log").read_text()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/{ACCOUNT}", timeout=5).close()
        except urllib.error.HTTPError:  # it wants a signature
            return
        except OSError:
            assert time.monotonic() < deadline, "azurite does not answer"
            threading.Event().wait(0.05)
        else:
            return
