"""Stores of one URL, with retries that do not wait long."""

import itertools
from contextlib import ExitStack

import hdfs_cluster
import hdfs_server
import pytest

from millstream.object_store import client as client_module
from millstream.object_store.cache import LocalCache
from millstream.object_store.cached import CachedObjectStore
from millstream.object_store.client import ObjectClient
from millstream.object_store.retries import RetryLimits

QUICK = RetryLimits(total_s=1.5, first_pause_s=0.005, pause_s_max=0.02)
PATIENT = RetryLimits(60, 0.005, 0.02)
_numbers = itertools.count(1)


@pytest.fixture
def new_store(s3_url, tmp_path):
    """Make stores of one URL and one cache, as processes of a machine have them."""
    return maker(s3_url, tmp_path / "cache")


@pytest.fixture
def new_azure_store(azure_url, tmp_path):
    """The same in Azure's protocol, of a server that is slower."""
    return maker(azure_url, tmp_path / "cache", PATIENT)


@pytest.fixture
def new_google_store(google_url, tmp_path):
    """The same in Google's protocol."""
    return maker(google_url, tmp_path / "cache", PATIENT)


@pytest.fixture
def new_hdfs_store(hdfs_url, tmp_path):
    """The same in HDFS, whose puts take three requests each."""
    return maker(hdfs_url, tmp_path / "cache", PATIENT)


@pytest.fixture(scope="session")
def hdfs_of_many(tmp_path_factory):
    """An HDFS of several namenodes and datanodes."""
    if reason := hdfs_cluster.HADOOP.why_not():
        pytest.skip(reason)
    with ExitStack() as opened:
        yield hdfs_cluster.HdfsCluster(tmp_path_factory.mktemp("hdfs-of-many"), opened)


@pytest.fixture(scope="session")
def hdfs_gateway(hdfs_of_many):
    """The address of a gateway before it."""
    if reason := hdfs_cluster.GATEWAY.why_not():
        pytest.skip(reason)
    hdfs_of_many.start_gateway()
    return hdfs_of_many.gateway


@pytest.fixture
def url_in_many(hdfs_of_many, monkeypatch):
    """A URL in it, under which there is nothing; the namenode in standby is asked first."""
    monkeypatch.setenv("HADOOP_USER_NAME", hdfs_server.USER)
    monkeypatch.setenv("MILLSTREAM_WEBHDFS", hdfs_of_many.addresses("b", "a"))
    client_module.open_requests.cache_clear()
    yield f"hdfs://both/test-{next(_numbers)}"
    client_module.open_requests.cache_clear()


@pytest.fixture
def new_standby_store(url_in_many, tmp_path):
    """Stores that ask a namenode in standby first."""
    return maker(url_in_many, tmp_path / "cache", PATIENT)


@pytest.fixture
def new_gateway_store(hdfs_gateway, url_in_many, tmp_path, monkeypatch):
    """Stores in HDFS behind a gateway."""
    monkeypatch.setenv("MILLSTREAM_WEBHDFS", hdfs_gateway)
    return maker(url_in_many, tmp_path / "cache", PATIENT)


def maker(url, cache, limits=QUICK):
    def make(size_max=1 << 30, policy=limits, folder=cache):
        return CachedObjectStore(ObjectClient(url, policy), LocalCache(folder, size_max, "x"))

    return make
