"""Stores of one URL, with retries that do not wait long."""

import pytest

from millstream.object_store.cache import LocalCache
from millstream.object_store.cached import CachedObjectStore
from millstream.object_store.client import ObjectClient
from millstream.object_store.retries import RetryLimits

QUICK = RetryLimits(total_s=1.5, first_pause_s=0.005, pause_s_max=0.02)


@pytest.fixture
def new_store(s3_url, tmp_path):
    """Make stores of one URL and one cache, as processes of a machine have them."""
    return maker(s3_url, tmp_path / "cache")


@pytest.fixture
def new_azure_store(azure_url, tmp_path):
    """The same in Azure's protocol, of a server that is slower."""
    return maker(azure_url, tmp_path / "cache", RetryLimits(60, 0.005, 0.02))


@pytest.fixture
def new_google_store(google_url, tmp_path):
    """The same in Google's protocol."""
    return maker(google_url, tmp_path / "cache", RetryLimits(60, 0.005, 0.02))


@pytest.fixture
def new_hdfs_store(hdfs_url, tmp_path):
    """The same in HDFS, whose puts take three requests each."""
    return maker(hdfs_url, tmp_path / "cache", RetryLimits(60, 0.005, 0.02))


def maker(url, cache, limits=QUICK):
    def make(size_max=1 << 30, policy=limits, folder=cache):
        return CachedObjectStore(ObjectClient(url, policy), LocalCache(folder, size_max, "x"))

    return make
