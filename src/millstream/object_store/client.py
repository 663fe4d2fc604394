"""One object store, as requests: what obstore does for us, with our retries and counts.

obstore has clients for S3, Google Cloud Storage and Azure in one small package without dependencies, puts an
object only if its name is free, and is as fast as any (docs/decisions/0051). Its own retries are off: they
say nothing, and do not cover a conditional put whose answer got lost.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa

from millstream.errors import EnvironmentProblem
from millstream.object_store.environment import environment_of, lacks_container
from millstream.object_store.retries import Attempts, RetryLimits, is_conflict
from millstream.object_store.store import RequestCounts

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Library

T = TypeVar("T")

_TIMEOUT_S = 60  # of one request: an object has some 60 MB at most
_CONNECT_TIMEOUT_S = 5
_DELETES_MAX = 1000  # names of one request
_PAGE_NAMES = 1000


@dataclass
class ObjectClient:
    """Requests to the objects under a URL. Threads may share it."""

    url: str
    policy: RetryLimits = field(default_factory=RetryLimits)
    counts: RequestCounts = field(default_factory=RequestCounts)
    _counting: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def put(self, name: str, data: memoryview) -> None:
        """Put an object under a name that nothing has.

        Raises:
            FileExistsError: the name is taken, by other bytes.
        """
        import obstore  # noqa: PLC0415 - an extra
        from obstore.exceptions import AlreadyExistsError  # noqa: PLC0415

        def call() -> None:
            try:
                obstore.put(self._library, name, data, mode="create", use_multipart=False)
            except AlreadyExistsError as error:
                if is_conflict(error):
                    raise
                raise FileExistsError(f"{self.url}/{name} exists") from None
            except FileNotFoundError:
                raise self._no_container() from None

        attempts = self._attempts("put", name)
        try:
            attempts.run(call)
        except FileExistsError:
            # The answer to an earlier try may have been lost: then the object is ours.
            if attempts.count == 1 or not self._is_there(name, data):
                raise
            attempts.report()
        finally:
            self._count(attempts, puts=attempts.count, bytes_up=len(data) * attempts.count)

    def _is_there(self, name: str, data: memoryview) -> bool:
        try:
            return bool(self.get(name) == pa.py_buffer(data))
        except FileNotFoundError:  # who had the name has removed it since
            return False

    def get(self, name: str) -> pa.Buffer:
        """Return an object.

        Raises:
            FileNotFoundError: there is none.
        """

        def call() -> pa.Buffer:
            try:
                # Both steps: a connection may be cut while the body is read.
                return pa.py_buffer(memoryview(self._library.get(name).bytes()))
            except FileNotFoundError as error:
                if lacks_container(error):
                    raise self._no_container() from None
                raise FileNotFoundError(f"{self.url}/{name} is not there") from None

        attempts, size = self._attempts("get", name), 0
        try:
            found = attempts.run(call)
            size = found.size
            return found
        finally:
            self._count(attempts, gets=attempts.count, bytes_down=size)

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, as many as there are."""
        for first in range(0, len(names), _DELETES_MAX):
            some = list(names[first : first + _DELETES_MAX])
            attempts = self._attempts("delete", some[0])
            try:
                attempts.run(partial(self._delete, some))
            finally:
                self._count(attempts, deletes=attempts.count)

    def size(self, name: str) -> int | None:
        """Return the size of an object; None if there is none."""
        import obstore  # noqa: PLC0415 - an extra

        attempts = self._attempts("head", name)
        try:
            return int(attempts.run(lambda: obstore.head(self._library, name))["size"])
        except FileNotFoundError:
            return None
        finally:
            self._count(attempts, gets=attempts.count)

    def names(self, prefix: str = "") -> Iterator[str]:
        """Yield the names under a prefix, in order; one request for a thousand of them."""
        return (name for name, _ in self.objects(prefix))

    def objects(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        """Yield the names under a prefix, in order, with the sizes of their objects."""
        listing = _Listing(prefix)
        while True:
            attempts, page = self._attempts("list", prefix), []
            try:
                page = attempts.run(partial(self._page, listing))
            finally:
                self._count(attempts, lists=attempts.count)
            if not page:
                return
            yield from page

    def _delete(self, names: list[str]) -> None:
        import obstore  # noqa: PLC0415 - an extra

        library = self._library
        try:
            obstore.delete(library, names)
        except FileNotFoundError:  # some stores say so of one of many
            for name in names:
                with suppress(FileNotFoundError):
                    obstore.delete(library, name)

    def _page(self, listing: _Listing) -> list[tuple[str, int]]:
        try:
            return listing.next_page(self._library)
        except Exception as error:
            if isinstance(error, FileNotFoundError) or lacks_container(error):
                raise self._no_container() from None
            raise

    @property
    def _library(self) -> Library:
        return _library(self.url, os.getpid())

    def _attempts(self, what: str, name: str) -> Attempts:
        return Attempts(what, f"{self.url}/{name}", self.policy)

    def _no_container(self) -> EnvironmentProblem:
        there = environment_of(self.url)
        return EnvironmentProblem(
            f"There is no {there.container} for {self.url}, or it is elsewhere. Create it, or correct the URL, or what "
            f"the environment says of where it is ({there.where})."
        )

    def _count(self, attempts: Attempts, **counts: int) -> None:
        with self._counting:
            again = max(0, attempts.count - 1)
            self.counts += replace(RequestCounts(), retries=again, **counts)


@dataclass
class _Listing:
    """The pages of a listing, by the store's own continuation.

    After a failure it begins anew, and passes over what it has given. Asking for the names after the last one instead
    would be shorter, but servers of Azure's protocol before 2026 ignore that, and give the first page for ever.
    """

    prefix: str
    _last: str = ""
    _given: str = ""  # the last name of all that was given before it began anew
    _pages: Iterator[Sequence[Any]] | None = None

    def next_page(self, library: Library) -> list[tuple[str, int]]:
        """Return the next names with their sizes; none at the end."""
        try:
            if self._pages is None:
                self._pages = iter(library.list(self.prefix or None, chunk_size=_PAGE_NAMES))
            for page in self._pages:
                found = [(each["path"], each["size"]) for each in page]
                if new := [each for each in found if each[0] > self._given]:
                    self._last = new[-1][0]
                    return new
        except BaseException:
            self._pages, self._given = None, self._last
            raise
        return []


def _timeouts() -> dict[str, Any]:
    return {
        "timeout": f"{_TIMEOUT_S}s",
        "connect_timeout": f"{_CONNECT_TIMEOUT_S}s",
        "allow_http": True,  # where the endpoint in the environment begins with http://
    }


@cache
def _library(url: str, _process: int) -> Library:
    """Return the library's store of this process: after a fork, the parent's has no threads.

    Raises:
        EnvironmentProblem: the library is not installed, or the environment lacks what the store needs.
    """
    try:
        from obstore.store import from_url  # noqa: PLC0415 - an extra
    except ModuleNotFoundError as missing:
        raise EnvironmentProblem(
            f'no module named {missing.name!r}: {url} needs pip install "millstream[s3]"'
        ) from missing
    load: Callable[..., Any] = from_url
    try:
        opened: Library = load(url, client_options=_timeouts(), retry_config={"max_retries": 0})
    except Exception as error:  # noqa: BLE001 - the library has one for each kind of store
        there = environment_of(url)
        raise EnvironmentProblem(
            f"{url} can't be used: {type(error).__name__}. Check the URL, and what the environment says: {there.where}, for "
            f"where it is, and {there.credentials}, for credentials."
        ) from None
    return opened
