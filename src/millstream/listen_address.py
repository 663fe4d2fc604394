"""Addresses to listen on: parsed, checked and bound, with errors that say what to do."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from importlib import import_module

from millstream.errors import ConfigError, EnvironmentProblem

_ADDRESS = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\s\[\]]*)):(\d{1,5})")


def parse_listen_address(text: str, example: str) -> tuple[str, int]:
    """Return host and port; the default host is 127.0.0.1.

    Raises:
        ConfigError: the text is not an address.
    """
    found = _ADDRESS.fullmatch(text)
    if found is None or int(found[3]) > 65535:
        port = example.rpartition(":")[2]
        raise ConfigError(
            f"The address to listen on is {text!r}. Give HOST:PORT, such as {example} or "
            f"[::1]:{port}; port 0 takes one that is free."
        )
    return found[1] or found[2] or "127.0.0.1", int(found[3])


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def bind(
    host: str, port: int, what: str, kind: socket.SocketKind = socket.SOCK_STREAM
) -> socket.socket:
    """Return a socket bound to an address. ``what`` names the server in errors: "page".

    Raises:
        ConfigError: it is not an address of this machine, or is in use.
    """
    try:
        found = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ConfigError(f"{host!r} is no address of this machine ({error.strerror}).") from error
    try:
        # So a connection that has just ended does not block the port; a listener still does. With
        # datagrams, two sockets could have the port at once, and one of them would receive nothing.
        if kind == socket.SOCK_STREAM:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                f"Port {port} of {host} is taken by another program, perhaps another {what}. End it, "
                "or listen on another port; port 0 takes one that is free."
            ) from error
        raise ConfigError(
            f"Cannot listen on {host}:{port} ({error.strerror}). Choose another address."
        ) from error
    return listener


def check_web_libraries(needs: str) -> None:
    """Make sure that the libraries of our HTTP servers are installed.

    Args:
        needs: What needs them: "The page needs".

    Raises:
        EnvironmentProblem: one is not installed; the extra ``ui`` brings it.
    """
    for name in ("uvicorn", "anyio", "starlette"):  # starlette imports anyio
        try:
            import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise EnvironmentProblem(
                f'{needs} {name}, which is not installed. Install it with pip install "millstream[ui]".'
            ) from error
