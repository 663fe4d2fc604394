"""Signatures of Standard Webhooks, by which a receiver checks that a request is ours, and new.

The signed text is ``ID.TIMESTAMP.BODY``, with HMAC-SHA-256; the header has ``v1,`` and the signature in
Base64, one for each secret, separated by spaces. Libraries in all languages can check it. The time is that
of the attempt, so that a receiver can refuse a replayed request.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from millstream.errors import ConfigError

_PREFIX = "whsec_"
_BYTES_MIN = 16


def read_secret(path: Path) -> bytes:
    """Return the secret that a file holds: ``whsec_`` and Base64, or any text.

    Raises:
        ConfigError: there is no such file, or its content is not a secret.
    """
    try:
        text = path.read_text("utf-8").strip()
        secret = text.encode()
        if text.startswith(_PREFIX):
            secret = base64.b64decode(text.removeprefix(_PREFIX), validate=True)
    except (OSError, ValueError, binascii.Error) as error:
        raise ConfigError(
            f"The secret cannot be read from {path} ({error}). Give a file with whsec_ and Base64, or with "
            "a line of text."
        ) from error
    if len(secret) < _BYTES_MIN:
        raise ConfigError(
            f"The secret in {path} has {len(secret)} bytes; give {_BYTES_MIN} or more, such as "
            "`openssl rand -hex 32` makes."
        )
    return secret


def signature(secrets: Sequence[bytes], name: str, timestamp_s: int, body: bytes) -> str:
    """Return the value of the header ``webhook-signature``.

    Args:
        secrets: The secret in use; during a rotation also the one before or after it.
        name: The value of ``webhook-id``.
        timestamp_s: The value of ``webhook-timestamp``.
    """
    signed = b"%s.%d.%s" % (name.encode(), timestamp_s, body)
    sums = (hmac.new(secret, signed, hashlib.sha256).digest() for secret in secrets)
    return " ".join(f"v1,{base64.b64encode(found).decode()}" for found in sums)
