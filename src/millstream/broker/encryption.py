"""TLS for a broker: the certificate that it shows, and what it refuses."""

from __future__ import annotations

import ssl
from pathlib import Path

from millstream.errors import ConfigError


def server_context(cert: Path, key: Path | None) -> ssl.SSLContext:
    """Return what a listener needs to speak TLS 1.2 and 1.3.

    Args:
        cert: The certificate, and after it those that lead to its issuer, as PEM.
        key: Its private key, as PEM and not encrypted; None if it stands in ``cert``.

    Raises:
        ConfigError: a file is not there, is not what it should be, or the two do not belong together.
    """
    named = f"certificate {cert}" if key is None else f"certificate {cert} and the key {key}"
    for path in (cert, key):
        if path is not None and not path.is_file():
            raise ConfigError(f"There is no file {path}; the {named} are read as PEM files.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Without a password the library would ask for one on the terminal.
    refused = ConfigError(
        f"The key of the {named} is encrypted. Give one that is not, in a file that only its owner "
        "reads: openssl pkey -in KEY -out NEW-KEY"
    )

    def password() -> str:
        raise refused

    try:
        context.load_cert_chain(cert, key, password=password)
    except OSError as error:  # an SSLError is one, too
        why = getattr(error, "reason", None) or error.strerror or "they are no PEM files"
        raise ConfigError(
            f"The {named} cannot be used: {str(why).lower().replace('_', ' ')}. Both are to be PEM "
            "files that belong together."
        ) from error
    return context
