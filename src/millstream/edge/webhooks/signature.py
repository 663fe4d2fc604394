"""Signatures by which a receiver knows that a request is ours, and new: those of Standard Webhooks.

Signed is ``ID.TIMESTAMP.BODY`` by HMAC-SHA-256; the header has ``v1,`` and the signature in Base64, one for
each secret, with spaces between. So a receiver in any language has a library that checks it. The time
is that of the attempt, so that a receiver can refuse what somebody has kept and sends again.
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
        ConfigError: there is no such file, or what it holds is no secret.
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
    """Return what stands in the header ``webhook-signature``.

    Args:
        secrets: The one in use, and while it is changed the one before it, or the one after.
        name: What stands in ``webhook-id``.
        timestamp_s: What stands in ``webhook-timestamp``.
    """
    signed = b"%s.%d.%s" % (name.encode(), timestamp_s, body)
    sums = (hmac.new(secret, signed, hashlib.sha256).digest() for secret in secrets)
    return " ".join(f"v1,{base64.b64encode(found).decode()}" for found in sums)
