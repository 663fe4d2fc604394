"""TLS for a broker: the certificate that it shows, which may be replaced while it runs."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from millstream.errors import ConfigError

_log = logging.getLogger(__name__)


class Certificate:
    """A certificate with its key, and ``context``, what a listener needs to speak TLS 1.2 and 1.3.

    Args:
        cert: The certificate, and after it those that lead to its issuer, as PEM.
        key: Its private key, as PEM and not encrypted; None if it stands in ``cert``.

    Raises:
        ConfigError: a file is not there, is not what it should be, or the two do not belong together.
    """

    def __init__(self, cert: Path, key: Path | None) -> None:
        self._cert, self._key = cert, key
        self._named = f"certificate {cert}" if key is None else f"certificate {cert}, key {key}"
        self._seen = self._version()
        self.context = _context()
        self._load(self.context)

    def refresh(self) -> None:
        """Show the certificate that is in the files now, to clients that come from now on.

        While they are being replaced, or cannot be used, the one that was read last is shown. To be
        called where handshakes begin: in the event loop.
        """
        try:
            version = self._version()
            if version == self._seen:
                return
            self._seen = version
            # Tried apart: a context keeps what it took before it found the rest to be wrong.
            self._load(_context())
            self._load(self.context)
        except ConfigError as error:
            _log.warning("the certificate stays as it was: %s", error)
        else:
            _log.info("the certificate was read again: %s", self._cert)

    def _version(self) -> tuple[tuple[int, int, int], ...]:
        """Return what changes when a file does."""
        versions = []
        for path in filter(None, (self._cert, self._key)):
            try:
                found = path.stat()
            except OSError as error:
                raise ConfigError(
                    f"There is no file {path} ({error.strerror}): {self._named} are to be PEM files."
                ) from error
            versions.append((found.st_ino, found.st_size, found.st_mtime_ns))
        return tuple(versions)

    def _load(self, context: ssl.SSLContext) -> None:
        # Without a password the library would ask for one on the terminal.
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
                f"{self._named} cannot be used: {_reason(error)}. Certificate and key are to be PEM "
                "files that belong together."
            ) from error


def _reason(error: OSError) -> str:
    """Return what is wrong with a file, as the library or the system says it."""
    if not isinstance(error, ssl.SSLError):
        return error.strerror or str(error)
    if not error.reason:  # as it is where it looked for something and did not find it
        return "one of them is not what it should be"
    return error.reason.lower().replace("_", " ")


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
