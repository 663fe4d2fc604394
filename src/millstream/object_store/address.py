"""Addresses of what is kept in a folder, or under a URL in an object store: runs of state, datasets.

Endpoint, region and credentials come from the environment, under the names that other clients use; a URL holds
none of them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from millstream.choices import format_choices
from millstream.errors import ConfigError

_SHAPE = "s3://bucket/prefix"
_EXAMPLES = {
    "file": "file:///folder",
    "hdfs": "hdfs://namenode/folder, without a port; MILLSTREAM_WEBHDFS says where its WebHDFS is, if not at port 9870",
}
_SCHEMES = {"s3": "s3", "s3a": "s3", "gs": "gs", "az": "az", "hdfs": "hdfs", "file": "file"}
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_ALMOST_URL = re.compile(r"\s*[A-Za-z][A-Za-z0-9+.-]+:/")
_PLACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[^/\s]+)*")
_PATH = re.compile(r"(/[^/\s]+)+")


@dataclass(frozen=True)
class ObjectUrl:
    """A URL under which objects are kept; ``text`` has no slash at its end."""

    text: str

    @property
    def folder(self) -> Path | None:
        """The folder of ``file://``; None where the objects are in an object store."""
        path = self.text.removeprefix("file://")
        return None if path == self.text else Path(path)


def is_url(state: str | Path | None) -> bool:
    """Return whether a state's address is a URL, and not a folder."""
    return isinstance(state, str) and _URL.fullmatch(state) is not None


def check_is_folder(path: str, what: str) -> None:
    """Make sure that what is no URL was not meant as one: it would be a folder such as ``s3:``.

    Raises:
        ConfigError: it begins like a URL. It is not shown, as it may have a password.
    """
    if _ALMOST_URL.match(path):
        raise ConfigError(
            f"{what} begins like a URL and is none: it has a space before it or one slash, as a Path of a URL has. Give "
            "it as text, such as s3://bucket/prefix; of a folder with such a name, ./ and the name."
        )


def state_url(state: str | Path | None) -> ObjectUrl | None:
    """Return the URL of a state's address; None if it is a folder. See :func:`parse_url`."""
    if isinstance(state, str) and is_url(state):
        return parse_state_url(state)
    if state is not None:
        check_is_folder(str(state), "The state's address")
    return None


def parse_state_url(text: str) -> ObjectUrl:
    """Parse the URL of a state: see :func:`parse_url`."""
    return parse_url(text, "The state's URL")


def parse_url(text: str, what: str) -> ObjectUrl:
    """Parse a URL; ``what`` it is of begins the messages.

    Raises:
        ConfigError: no object store of ours has such URLs, or it may hold credentials.
    """
    found = _URL.fullmatch(text)
    assert found is not None
    scheme, rest = found["scheme"], found["rest"].rstrip("/")
    if "@" in rest or "?" in rest or "#" in rest:  # not shown: it may be a password
        raise ConfigError(
            f"{what} ({scheme}://…) has a character that it can't have: @, ? or #. Give it as {_SHAPE}; "
            "credentials, endpoint and region come from the environment, such as AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL and AWS_REGION."
        )
    if scheme not in _SCHEMES:
        raise ConfigError(
            f"{what} begins with {scheme}://. Choose {format_choices(tuple(_SCHEMES))}, or mount the "
            "file system on every machine, and give its path."
        )
    shape = _PATH if scheme == "file" else _PLACE
    if not shape.fullmatch(rest) or ".." in rest.split("/"):
        example = _EXAMPLES.get(scheme, _SHAPE)
        raise ConfigError(f"{what} is {text!r}. Give it as {example}.")
    return ObjectUrl(f"{_SCHEMES[scheme]}://{rest}")
