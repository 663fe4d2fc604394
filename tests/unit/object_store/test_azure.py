"""The faults of an object store in Azure's protocol, whose statuses and codes differ from S3's; on Azurite."""

import os
import shutil

import pyarrow as pa
import pytest
from azure_server import ACCOUNT, KEY

from millstream.errors import EnvironmentProblem, ObjectStoreUnavailableError
from millstream.object_store import client as client_module
from millstream.object_store.cached import checksum_of
from millstream.object_store.client import ObjectClient
from millstream.object_store.retries import RetryLimits
from millstream.object_store.store import Extent

pytestmark = pytest.mark.long
DATA = os.urandom(300_000)
WHOLE = Extent(0, len(DATA), whole=True, checksum=checksum_of(pa.py_buffer(DATA)))


def put(store, name="1-a"):
    store.put(name, lambda file: file.write(DATA))
    store.sync()


@pytest.mark.parametrize("kind", ["503", "cut upload", "lost answer", "slow", "silence"])
def test_an_upload_survives_two_faults(azure, new_azure_store, kind):
    azure.fail_first(2, "PUT", kind)
    store = new_azure_store()
    put(store)
    assert store.requests.retries == (0 if kind == "slow" else 2)
    assert new_azure_store().client.get("1-a").to_pybytes() == DATA


@pytest.mark.parametrize("kind", ["503", "cut download", "lost answer", "slow", "silence"])
def test_a_download_survives_two_faults(azure, new_azure_store, tmp_path, kind):
    put(new_azure_store())
    shutil.rmtree(tmp_path / "cache")
    azure.fail_first(2, "GET", kind)
    store = new_azure_store()
    assert store.read("1-a", WHOLE).data.to_pybytes() == DATA
    assert store.requests.gets == (1 if kind == "slow" else 3)


def test_a_torn_upload_leaves_no_object(azure, new_azure_store):
    azure.fail_first(10**9, "PUT", "cut upload")
    with pytest.raises(ObjectStoreUnavailableError):
        put(new_azure_store(policy=RetryLimits(1, 0.01, 0.05)))
    azure.decide = lambda *_: None
    assert list(new_azure_store().names()) == []


def test_many_names_are_listed_once_each_whatever_fails(azure, new_azure_store):
    store = new_azure_store()
    names = [f"1-{number:02d}" for number in range(12)]
    for name in names:
        put(store, name)
    azure.fail_first(1, "GET", "cut download")
    assert list(new_azure_store().names()) == names
    azure.fail_first(1, "POST", "503")
    store.delete_all()
    assert list(new_azure_store().names()) == []


def test_a_container_that_is_not_there_is_told(azure):
    client = ObjectClient("az://none/p")
    for call in (
        lambda: client.put("a", memoryview(b"x")),
        lambda: client.get("a"),
        lambda: list(client.names()),
    ):
        with pytest.raises(EnvironmentProblem, match="There is no container for az://none/p"):
            call()


def test_a_wrong_key_is_refused_at_once_and_not_shown(azure, new_azure_store, monkeypatch):
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "b3RoZXI=")
    client_module._library.cache_clear()
    with pytest.raises(EnvironmentProblem, match=r"status 403 Forbidden .*AZURE_STORAGE_") as e:
        put(new_azure_store())
    assert ACCOUNT not in str(e.value)
    assert "b3RoZXI=" not in str(e.value)
    assert KEY not in str(e.value)
    assert azure.count("PUT") == 1
    client_module._library.cache_clear()
