"""One object store, as requests with our retries and counts; whether HTTP is spoken to a cloud's store or to HDFS."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial

import pyarrow as pa

from millstream.errors import EnvironmentProblem
from millstream.object_store.cloud_requests import CloudRequests
from millstream.object_store.environment import environment_of, lacks_container
from millstream.object_store.requests import Page, Pages, Requests
from millstream.object_store.retries import Attempts, RetryLimits
from millstream.object_store.store import RequestCounts
from millstream.object_store.webhdfs import WebHdfs

_DELETES_MAX = 1000  # names of one request


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

        def call() -> None:
            try:
                self._requests.put(name, data)
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
                return pa.py_buffer(self._requests.get(name))
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
        attempts = self._attempts("head", name)
        try:
            return attempts.run(lambda: self._requests.size(name))
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
            attempts = self._attempts("list", prefix)
            try:
                page = attempts.run(partial(self._page, listing))
            finally:
                self._count(attempts, lists=attempts.count)
            if not page:
                return
            yield from page

    def _delete(self, names: list[str]) -> None:
        self._requests.delete(names)

    def delete_folders(self) -> None:
        """Delete the folders that objects were in, where a store has any, if they are empty."""
        attempts = self._attempts("delete", "")
        attempts.run(self._requests.delete_folders)

    def _page(self, listing: _Listing) -> Page:
        try:
            return listing.next_page(self._requests)
        except Exception as error:
            if isinstance(error, FileNotFoundError) or lacks_container(error):
                raise self._no_container() from None
            raise

    @property
    def _requests(self) -> Requests:
        return open_requests(self.url, os.getpid())

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
    _pages: Pages | None = None

    def next_page(self, requests: Requests) -> Page:
        """Return the next names with their sizes; none at the end."""
        try:
            if self._pages is None:
                self._pages = requests.pages(self.prefix)
            while page := self._pages.next_page():
                if new := [each for each in page if each[0] > self._given]:
                    self._last = new[-1][0]
                    return new
        except BaseException:
            if self._pages is None or not self._pages.resumes:
                self._pages, self._given = None, self._last
            raise
        return []


@cache
def open_requests(url: str, _process: int) -> Requests:
    """Return what makes this process's requests under a URL.

    Raises:
        EnvironmentProblem: a library is not installed, or the environment lacks what the store needs.
    """
    return WebHdfs.open(url) if url.startswith("hdfs://") else CloudRequests.open(url)
