"""Certificates for tests, made by openssl when they are wanted."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class Certificate(NamedTuple):
    """A certificate that signs itself, and its key."""

    cert: Path
    key: Path


def made(folder: Path, name: str = "127.0.0.1") -> Certificate:
    """Return a certificate for this machine."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed: no certificate can be made")
    found = Certificate(folder / "cert.pem", folder / "key.pem")
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-days", "2", "-noenc", "-subj", f"/CN={name}"),
            *("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"),
            *("-keyout", str(found.key), "-out", str(found.cert)),
        ],
        check=True,
        capture_output=True,
    )
    return found
