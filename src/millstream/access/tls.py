"""TLS for a server: its certificate, which may be replaced while the server runs."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from millstream.errors import ConfigError

_log = logging.getLogger(__name__)


class Certificate:
    """A certificate with its key, and ``context``, the TLS 1.2 and 1.3 context of a listener.

    Args:
        cert: The certificate, and after it those that lead to its issuer, as PEM.
        key: Its private key, as PEM and not encrypted; None if it is in ``cert``.

    Raises:
        ConfigError: a file is missing or invalid, or the two do not belong together.
    """

    def __init__(self, cert: Path, key: Path | None) -> None:
        self._cert, self._key = cert, key
        self._named = f"certificate {cert}" if key is None else f"certificate {cert}, key {key}"
        self._seen = self._version()
        self.context = _context()
        self._load(self.context)

    def refresh(self) -> None:
        """Use the certificate that is in the files now for new connections.

        While the files are being replaced, or cannot be used, the last certificate remains in use. Must
        be called where handshakes begin, by nobody else meanwhile: in the event loop, or under a lock.
        """
        try:
            version = self._version()
            if version == self._seen:
                return
            self._seen = version
            # Checked with a separate context: one that fails halfway keeps what it has loaded.
            self._load(_context())
            self._load(self.context)
        except ConfigError as error:
            _log.warning("the certificate was not renewed: %s", error)
        else:
            _log.info("the certificate was read again: %s", self._cert)

    def _version(self) -> tuple[tuple[int, int, int], ...]:
        """Return a value that changes when a file does."""
        versions = []
        for path in filter(None, (self._cert, self._key)):
            try:
                found = path.stat()
            except OSError as error:
                raise ConfigError(
                    f"{path} cannot be read ({error.strerror}). {self._named}: give the paths of PEM files."
                ) from error
            versions.append((found.st_ino, found.st_size, found.st_mtime_ns))
        return tuple(versions)

    def _load(self, context: ssl.SSLContext) -> None:
        # Without a callback the library would prompt for a password on the terminal.
        encrypted = ConfigError(
            f"The key is encrypted ({self._named}). Give one that is not, in a file that only its "
            "owner reads: openssl pkey -in KEY -out NEW-KEY"
        )

        def password() -> str:
            raise encrypted

        try:
            context.load_cert_chain(self._cert, self._key, password=password)
        except OSError as error:  # an SSLError is one, too
            raise ConfigError(
                f"{self._named} cannot be used: {_reason(error)}. Certificate and key must be PEM "
                "files that belong together."
            ) from error


def certificate_of(cert: Path | None, key: Path | None) -> Certificate | None:
    """Return what connections are encrypted with; None without a certificate.

    Raises:
        ConfigError: certificate or key are missing, or cannot be used.
    """
    if cert is not None:
        return Certificate(cert, key)
    if key is not None:
        raise ConfigError(f"There is a key, {key}, and no certificate. Give it with --tls-cert.")
    return None


def _reason(error: OSError) -> str:
    """Return the reason from the library or the system."""
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    if not error.reason:  # the library found no certificate or key in a file
        return "one of them has no certificate or key"
    return error.reason.lower().replace("_", " ")


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
