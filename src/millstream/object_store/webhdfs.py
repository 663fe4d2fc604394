"""Requests to HDFS by its WebHDFS interface: HTTP, without a library of Hadoop's and without a JVM.

A file of HDFS can be seen while it is written, so an object is put as a draft beside it, which is renamed:

1. The namenode creates the draft, and says which datanode takes its bytes. A crash leaves an empty draft.
2. The datanode takes them, and closes the draft. A crash leaves a draft, whole or not.
3. The namenode renames the draft to the object's name, in one step, and only if nothing has that name. From here on the object
   is there, whole. A crash leaves it; whoever puts it again finds the name taken, and compares.

Drafts are in no listing. A listing removes those of its own user that are an hour old by the namenode's clock; whoever still writes one
of these finds it gone at step 3, and begins anew.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPSConnection
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from millstream.errors import EnvironmentProblem
from millstream.object_store.environment import WEBHDFS
from millstream.object_store.kerberos import Login, proof, wants_kerberos
from millstream.object_store.requests import Page
from millstream.object_store.retries import CONNECT_TIMEOUT_S, TIMEOUT_S, RequestError

_PORT = 9870  # of a namenode's WebHDFS, where Hadoop's settings name no other
_DRAFT = ".draft"
_DRAFT_AGE_S_MAX = 3600  # a put is tried for two minutes
_DATANODE_LEFT_OUT_S = 60.0
_PAGE_NAMES = 1000
_REDIRECTED = 307
_FINAL = {
    "AccessControlException",
    "AuthorizationException",
    "DSQuotaExceededException",
    "IllegalArgumentException",
    "InvalidPathException",
    "InvalidToken",
    "NSQuotaExceededException",
    "SecurityException",
    "UnsupportedOperationException",
}


@dataclass(frozen=True)
class _Answer:
    status: int
    reason: str
    headers: HTTPMessage
    body: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return {}


@dataclass
class WebHdfs:
    """Requests to the files of a folder. ``addresses``: of the namenodes, or of gateways, as URLs; one of them is asked at a time."""

    url: str
    addresses: list[str]
    folder: str
    user: str
    _asked: int = 0
    _logins: dict[str, Login] = field(default_factory=dict, repr=False)  # by address
    _failed: dict[str, float] = field(default_factory=dict, repr=False)  # datanodes, and until when

    @classmethod
    def open(cls, url: str) -> WebHdfs:
        """Return what asks for the files under a URL.

        Raises:
            EnvironmentProblem: the environment's addresses are none.
        """
        name, _, folder = url.removeprefix("hdfs://").partition("/")
        named = os.environ.get(WEBHDFS) or f"http://{name}:{_PORT}"
        addresses = [each.strip().rstrip("/") for each in named.split(",")]
        for each in addresses:
            if urlsplit(each).scheme not in {"http", "https"} or not urlsplit(each).hostname:
                raise EnvironmentProblem(
                    f"{WEBHDFS} is {named!r}. Give the addresses of the namenodes' WebHDFS, with commas between, such as "
                    "http://namenode-a:9870,http://namenode-b:9870."
                )
        user = os.environ.get("HADOOP_USER_NAME") or getpass.getuser()
        return cls(url, addresses, f"/{folder}".rstrip("/"), user)

    def put(self, name: str, data: memoryview) -> None:
        folder, _, last = f"{self.folder}/{name}".rpartition("/")
        draft = f"{folder}/.{last}.{uuid.uuid4().hex}{_DRAFT}"
        try:
            self._pass_to_datanode("PUT", draft, data, op="CREATE", overwrite="true")
            self._rename(draft, f"{self.folder}/{name}")
        except FileNotFoundError:
            raise RequestError("the draft of the object was gone before it had its name") from None
        except FileExistsError:
            with suppress(OSError):  # a listing removes it later
                self._delete(draft)
            raise FileExistsError(f"{self.url}/{name} exists") from None

    def get(self, name: str) -> memoryview:
        return memoryview(self._pass_to_datanode("GET", f"{self.folder}/{name}", None, op="OPEN"))

    def size(self, name: str) -> int:
        answer = self._ask("GET", f"{self.folder}/{name}", op="GETFILESTATUS").json()
        status = answer.get("FileStatus", {})
        if status.get("type") != "FILE":
            raise FileNotFoundError(f"{self.url}/{name} is not a file")
        return int(status["length"])

    def delete(self, names: list[str]) -> None:
        while names:
            self._delete(f"{self.folder}/{names[-1]}")
            names.pop()

    def pages(self, prefix: str) -> _Walk:
        return _Walk(self, [(prefix.rstrip("/"), None)])

    def delete_folders(self) -> None:
        for inner in self._folders(""):
            path = f"{self.folder}/{inner}".rstrip("/")
            with suppress(_NotEmptyError):
                self._delete(path)

    def _folders(self, inner: str) -> Iterator[str]:
        """Yield a folder and those below it, the lowest first."""
        for name, size in self.listed(inner):
            if size is None:
                yield from self._folders(name)
        yield inner

    def listed(self, inner: str) -> list[tuple[str, int | None]]:
        """Return what a folder has, in the order of the names below it: files with sizes, and folders.

        Drafts are left out, and those that nobody writes any more are removed.
        """
        path = f"{self.folder}/{inner}".rstrip("/")
        try:
            answer = self._ask("GET", path, op="LISTSTATUS")
        except FileNotFoundError:
            return []
        found: list[tuple[str, int | None]] = []
        for status in answer.json().get("FileStatuses", {}).get("FileStatus", []):
            name, is_folder = status["pathSuffix"], status["type"] == "DIRECTORY"
            if name.startswith(".") and name.endswith(_DRAFT):
                if status.get("owner") == self.user and _is_abandoned(status, answer):
                    with suppress(OSError):
                        self._delete(f"{path}/{name}")
            elif name:  # a file that is listed itself has none
                below = f"{inner}/{name}" if inner else name
                found.append((below, None if is_folder else int(status["length"])))
        return sorted(found, key=lambda each: each[0] + ("/" if each[1] is None else ""))

    def _rename(self, path: str, wanted: str) -> None:
        # With an option the namenode says why not. A gateway may know no options, and then says only that it did not.
        asked = {"op": "RENAME", "destination": wanted, "renameoptions": "NONE"}
        if self._ask("PUT", path, **asked).json().get("boolean") is False:
            self._ask("GET", path, op="GETFILESTATUS")  # there: then the wanted name is taken
            raise FileExistsError

    def _delete(self, path: str) -> None:
        self._ask("DELETE", path, op="DELETE", recursive="false")

    def _pass_to_datanode(
        self, method: str, path: str, data: memoryview | None, **query: str
    ) -> bytes:
        """Ask the namenode where the bytes of a file go, or are, and send or fetch them there."""
        answer = self._ask_for_datanode(method, path, **query)
        place = answer.headers.get("Location")
        if place is None and data is None and answer.status == 200:
            return answer.body  # of a gateway, which has fetched them
        if answer.status != _REDIRECTED or not place:
            raise RequestError(
                f"status {answer.status} {answer.reason} in place of a datanode", final=True
            )
        try:
            return _checked(self._answer_at(place, method, data)).body
        except RequestError:
            self._failed[_ip_address(place)] = time.monotonic() + _DATANODE_LEFT_OUT_S
            raise

    def _answer_at(self, place: str, method: str, data: memoryview | None) -> _Answer:
        """Return what the place answers that a namenode has named. A gateway names itself, and wants to know there, too, who asks."""
        asked = next((each for each in self.addresses if place.startswith(f"{each}/")), "")
        login = self._logins.get(asked, Login())
        answer = _request(method, place, data, login.headers)
        if asked and wants_kerberos(answer.status, answer.headers):
            answer = _request(method, place, data, proof(urlsplit(asked).hostname or ""))
        return answer

    def _ask_for_datanode(self, method: str, path: str, **query: str) -> _Answer:
        now = time.monotonic()
        if failed := [name for name, until in list(self._failed.items()) if until > now]:
            try:
                return self._ask(method, path, **query, excludedatanodes=",".join(failed))
            except RequestError as error:
                if error.final:
                    raise
        self._failed.clear()  # they may be all that there are
        return self._ask(method, path, **query)

    def _ask(self, method: str, path: str, **query: str) -> _Answer:
        """Ask the namenode that is asked at the moment. If it fails or is not the active one, the next request goes to the next."""
        address = self.addresses[self._asked % len(self.addresses)]
        try:
            return _checked(self._answer(address, method, quote(path) or "/", query))
        except RequestError as error:
            if not error.final:
                self._asked += 1
            raise

    def _answer(self, address: str, method: str, path: str, query: Mapping[str, str]) -> _Answer:
        """Return what an address answers, which has been told who asks in the way that it wants."""
        url = f"{address}/webhdfs/v1{path}?{urlencode(query)}"
        login = self._logins.get(address)
        if login is None:
            answer = _request(method, f"{url}&{urlencode({'user.name': self.user})}", None)
        else:
            answer = _request(method, url, None, login.headers)
        if wants_kerberos(answer.status, answer.headers):
            answer = _request(method, url, None, proof(urlsplit(address).hostname or ""))
            if answer.status != 401:
                self._logins[address] = login = Login.of(answer.headers)
                self.user = login.user or self.user
        return answer


@dataclass
class _Walk:
    """The files below a folder, in the order of their names. What failed is asked for again, and nothing else."""

    requests: WebHdfs
    # Files with sizes, and folders that are still to be listed. The last is next.
    waiting: list[tuple[str, int | None]]
    resumes: bool = True
    _page: list[tuple[str, int]] = field(default_factory=list)

    def next_page(self) -> Page:
        while self.waiting and len(self._page) < _PAGE_NAMES:
            name, size = self.waiting[-1]
            found = self.requests.listed(name) if size is None else []
            self.waiting.pop()
            self.waiting += reversed(found)
            if size is not None:
                self._page.append((name, size))
        page, self._page = self._page, []
        return page


class _NotEmptyError(RequestError):
    """A folder has something in it, and stays."""


def _ip_address(url: str) -> str:
    """Return the address of a URL's host, as the namenode knows its datanodes by theirs."""
    host = urlsplit(url).hostname or ""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return host


def _request(
    method: str, url: str, data: memoryview | None, headers: Mapping[str, str] | None = None
) -> _Answer:
    """Send one request; return its answer, whatever it is.

    Raises:
        RequestError: there is none.
    """
    parts = urlsplit(url)
    kind = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=CONNECT_TIMEOUT_S)
    try:
        try:
            connection.connect()
        except OSError as error:
            raise RequestError(f"no connection to {parts.netloc}") from error
        connection.sock.settimeout(TIMEOUT_S)
        sent = dict(headers or {})
        if data is not None:
            sent["Content-Type"] = "application/octet-stream"
        try:
            connection.request(method, f"{parts.path}?{parts.query}", body=data, headers=sent)
            answer = connection.getresponse()
            return _Answer(answer.status, answer.reason, answer.headers, answer.read())
        except TimeoutError as error:
            raise RequestError("no answer in time") from error
        except (OSError, HTTPException) as error:
            raise RequestError("the connection was cut") from error
    finally:
        connection.close()


def _checked(answer: _Answer) -> _Answer:
    """Return an answer that is a success, or leads elsewhere.

    Raises:
        FileNotFoundError, FileExistsError: there is no such file, or there is one.
        RequestError: it is any other answer.
    """
    if answer.status < 400:
        return answer
    exception = str(answer.json().get("RemoteException", {}).get("exception", ""))
    if exception == "FileNotFoundException":
        raise FileNotFoundError("there is no such file")
    if exception == "FileAlreadyExistsException":
        raise FileExistsError("there is such a file")
    said = f"status {answer.status} {answer.reason}" + (f" ({exception})" if exception else "")
    if exception == "PathIsNotEmptyDirectoryException":
        raise _NotEmptyError(said, final=True)
    # Of a namenode that starts, or is not the active one, or finds no datanode, the status is 403, too.
    unknown = not exception and answer.status < 500 and answer.status not in {408, 429}
    raise RequestError(said, final=unknown or answer.status == 401 or exception in _FINAL)


def _is_abandoned(status: Mapping[str, Any], answer: _Answer) -> bool:
    """Return whether a draft is so old by the namenode's clock that nobody writes it any more."""
    try:
        now_s = parsedate_to_datetime(answer.headers["Date"]).timestamp()
    except (TypeError, ValueError):
        return False
    return bool(now_s - status["modificationTime"] / 1000 > _DRAFT_AGE_S_MAX)
