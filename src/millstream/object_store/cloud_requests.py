"""Requests to S3, Google Cloud Storage and Azure by obstore.

obstore has clients of all three in one small package without dependencies, puts an object only if its name is free, and is as
fast as any (docs/decisions/0051). Its own retries are off: they say nothing, and do not cover a conditional put whose
answer got lost.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from millstream.errors import EnvironmentProblem
from millstream.object_store.environment import environment_of
from millstream.object_store.requests import Page
from millstream.object_store.retries import CONNECT_TIMEOUT_S, TIMEOUT_S, is_conflict

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Library

_PAGE_NAMES = 1000


@dataclass
class CloudRequests:
    """Requests to the objects under a URL. After a fork, the parent's has no threads."""

    url: str
    library: Library

    @classmethod
    def open(cls, url: str) -> CloudRequests:
        """Open the objects under a URL.

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
            return cls(url, load(url, client_options=_options(), retry_config={"max_retries": 0}))
        except Exception as error:  # noqa: BLE001 - the library has one for each kind of store
            there = environment_of(url)
            raise EnvironmentProblem(
                f"{url} can't be used: {type(error).__name__}. Check the URL, and what the environment says: {there.where}, for "
                f"where it is, and {there.credentials}, for credentials."
            ) from None

    def put(self, name: str, data: memoryview) -> None:
        import obstore  # noqa: PLC0415 - an extra
        from obstore.exceptions import AlreadyExistsError  # noqa: PLC0415

        try:
            obstore.put(self.library, name, data, mode="create", use_multipart=False)
        except AlreadyExistsError as error:
            if is_conflict(error):
                raise
            raise FileExistsError(f"{self.url}/{name} exists") from None

    def get(self, name: str) -> memoryview:
        # Both steps: a connection may be cut while the body is read.
        return memoryview(self.library.get(name).bytes())

    def size(self, name: str) -> int:
        import obstore  # noqa: PLC0415 - an extra

        return int(obstore.head(self.library, name)["size"])

    def delete(self, names: list[str]) -> None:
        import obstore  # noqa: PLC0415 - an extra

        try:
            obstore.delete(self.library, list(names))
        except FileNotFoundError:  # some stores say so of one of many
            self._delete_each(names)
        except Exception:
            if not self.url.startswith("gs://"):
                raise
            self._delete_each(
                names
            )  # it has no request for many, and all were asked for side by side

    def _delete_each(self, names: list[str]) -> None:
        import obstore  # noqa: PLC0415 - an extra

        while names:
            with suppress(FileNotFoundError):
                obstore.delete(self.library, names[-1])
            names.pop()

    def pages(self, prefix: str) -> _CloudPages:
        return _CloudPages(iter(self.library.list(prefix or None, chunk_size=_PAGE_NAMES)))

    def delete_folders(self) -> None:
        """Do nothing: names have slashes, and there are no folders."""


@dataclass
class _CloudPages:
    """Pages by the library's own continuation, which ends with a failure."""

    library: Iterator[Sequence[Any]]
    resumes: bool = False

    def next_page(self) -> Page:
        return [(each["path"], each["size"]) for each in next(self.library, ())]


def _options() -> dict[str, Any]:
    return {
        "timeout": f"{TIMEOUT_S}s",
        "connect_timeout": f"{CONNECT_TIMEOUT_S}s",
        "allow_http": True,  # where the endpoint in the environment begins with http://
    }
