"""Proof of who asks an HTTP server that wants Kerberos (SPNEGO, RFC 4559).

The tickets are those of the system's Kerberos, which the package gssapi asks: of ``kinit``, or of a keytab that ``KRB5_CLIENT_KTNAME``
names, with which MIT's library takes new ones before the old ones expire. A server that has seen a proof gives a cookie, which stands for it
until the server refuses it; then it is proven again.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from http.client import HTTPMessage
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

from millstream.errors import EnvironmentProblem
from millstream.object_store.retries import RequestError

_SPNEGO = "1.3.6.1.5.5.2"
_KERBEROS = "1.2.840.113554.1.2.2"
_UNKNOWN_SERVER = "not found in Kerberos database"  # MIT's words
_COOKIE = "hadoop.auth"
_REMEDY = (
    "Take a ticket (kinit), or name a keytab by KRB5_CLIENT_KTNAME, with which tickets are taken as they are needed; for executors, too "
    "(docs/cluster.md)."
)


@dataclass(frozen=True)
class Login:
    """What a server knows us by: its cookie, if it gave one, and our name there, if it said it."""

    cookie: str = ""
    user: str = ""

    @classmethod
    def of(cls, headers: HTTPMessage) -> Login:
        """Return what an answer to a proof gives."""
        found: SimpleCookie = SimpleCookie()
        for each in headers.get_all("Set-Cookie", []):
            try:
                found.load(each)
            except CookieError:
                continue
        if _COOKIE not in found or not found[_COOKIE].value:
            return cls()
        token = found[_COOKIE]
        return cls(f"{_COOKIE}={token.coded_value}", parse_qs(token.value).get("u", [""])[0])

    @property
    def headers(self) -> dict[str, str]:
        return {"Cookie": self.cookie} if self.cookie else {}


def wants_kerberos(status: int, headers: HTTPMessage) -> bool:
    """Return whether an answer asks for a proof of who we are."""
    given = headers.get_all("WWW-Authenticate", [])
    return status == 401 and any(each.strip().lower().startswith("negotiate") for each in given)


def proof(host: str) -> dict[str, str]:
    """Return the headers that prove who asks the HTTP server of a host.

    Raises:
        EnvironmentProblem: the package is not installed, or there is no ticket.
        RequestError: there is no answer of Kerberos, or it knows no such server.
    """
    try:
        import gssapi  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise EnvironmentProblem(
            f"The HTTP server of {host} wants Kerberos, and the package gssapi cannot be loaded ({error}): pip install "
            '"millstream[kerberos]", which needs the headers of MIT Kerberos (Debian: libkrb5-dev) and a C compiler.'
        ) from error
    try:
        token = _token(gssapi, host)
    except (
        gssapi.exceptions.MissingCredentialsError,
        gssapi.exceptions.ExpiredCredentialsError,
        gssapi.exceptions.InvalidCredentialsError,
    ) as error:
        raise EnvironmentProblem(
            f"The HTTP server of {host} wants Kerberos, and there is no valid ticket here ({_said(error)}). {_REMEDY}"
        ) from error
    except gssapi.exceptions.GSSError as error:
        said = _said(error)
        raise RequestError(
            f"no ticket for HTTP/{host} ({said})", final=_UNKNOWN_SERVER in said
        ) from error
    return {"Authorization": f"Negotiate {base64.b64encode(token).decode()}"}


def _token(gssapi: Any, host: str) -> bytes:
    # Asked for by themselves, as SPNEGO does not say that they are missing or have expired.
    tickets = gssapi.Credentials(usage="initiate", mechs=[gssapi.OID.from_int_seq(_KERBEROS)])
    tickets.inquire(lifetime=True)  # an error, if they have expired
    server = gssapi.Name(f"HTTP@{host}", gssapi.NameType.hostbased_service)
    context = gssapi.SecurityContext(
        name=server, mech=gssapi.OID.from_int_seq(_SPNEGO), usage="initiate", flags=0
    )
    return bytes(context.step() or b"")


def _said(error: Any) -> str:
    """Return why, in Kerberos' words, in one line."""
    return " ".join(str(error).split())
