"""A real S3 server for the tests of this folder, if there is one, with a proxy in front that makes faults."""

import itertools

import pytest
from s3_server import HOW_TO_GET_IT, FaultProxy, environment, find_binary, s3_server

from millstream.object_store.cache import LocalCache
from millstream.object_store.cached import CachedObjectStore
from millstream.object_store.client import ObjectClient
from millstream.object_store.retries import RetryPolicy

QUICK = RetryPolicy(total_s=1.5, first_pause_s=0.005, pause_s_max=0.02)
_numbers = itertools.count()


@pytest.fixture(scope="session")
def server(tmp_path_factory):
    if find_binary() is None:
        pytest.skip(HOW_TO_GET_IT)
    with s3_server(tmp_path_factory.mktemp("s3"), "bucket") as port, FaultProxy(port) as proxy:
        yield proxy


@pytest.fixture
def proxy(server, monkeypatch):
    """The proxy, without faults, and an environment in which clients go through it."""
    for name, value in environment(server.port).items():
        monkeypatch.setenv(name, value)
    server.decide = lambda _method, _path: None
    server.requests.clear()
    yield server
    server.decide = lambda _method, _path: None


@pytest.fixture
def url(proxy):
    """A URL under which there is nothing."""
    return f"s3://bucket/test-{next(_numbers)}"


@pytest.fixture
def new_store(url, tmp_path):
    """Make stores of one URL and one cache, as processes of a machine have them."""

    def make(size_max=1 << 30, policy=QUICK, folder=tmp_path / "cache"):
        return CachedObjectStore(ObjectClient(url, policy), LocalCache(folder, size_max, "x"))

    return make
