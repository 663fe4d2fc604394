"""What a folder and an object store promise alike."""

import pyarrow as pa
import pytest

from millstream.errors import CorruptionError
from millstream.object_store.cached import checksum_of
from millstream.object_store.folder import FolderStore
from millstream.object_store.store import Extent


@pytest.fixture(
    params=[
        "folder",
        "new_store",
        "new_google_store",
        pytest.param("new_azure_store", marks=pytest.mark.long),
        pytest.param("new_hdfs_store", marks=pytest.mark.long),
        pytest.param("new_standby_store", marks=pytest.mark.long),
        pytest.param("new_gateway_store", marks=pytest.mark.long),
    ]
)
def make(request, tmp_path):
    if request.param == "folder":
        return lambda: FolderStore(tmp_path / "objects")
    return request.getfixturevalue(request.param)


def put(store, name, data):
    return store.put(name, lambda file: file.write(data))


def whole(data):
    return Extent(0, len(data), whole=True, checksum=checksum_of(pa.py_buffer(data)))


def read(store, name, extent):
    return store.read(name, extent).data.to_pybytes()


def test_what_was_put_is_read_by_another_process(make):
    store = make()
    data = bytes(range(256)) * 4096
    stored = put(store, "1-a", data)
    assert stored.size_bytes == len(data)
    assert read(store, "1-a", whole(data)) == data  # before it is durable
    store.sync()
    assert read(make(), "1-a", whole(data)) == data


def test_a_part_of_an_object_is_read(make):
    store = make()
    put(store, "1-a", b"abc" + b"defg" + b"h")
    store.sync()
    assert read(make(), "1-a", Extent(3, 4, whole=False)) == b"defg"


def test_a_name_that_is_taken_is_refused_and_its_object_stays(make):
    store = make()
    put(store, "1-a", b"first")
    store.sync()
    other = make()
    with pytest.raises(FileExistsError):
        put(other, "1-a", b"other")
        other.sync()
    assert _object(make(), "1-a") == b"first"


def _object(store, name):
    if isinstance(store, FolderStore):
        return (store.folder / name).read_bytes()
    return store.client.get(name).to_pybytes()


def test_names_are_those_under_a_prefix_by_whole_segments(make):
    store = make()
    for name in ("runs/1-a", "runs/2-b", "runs-old/1-a", "started/7"):
        put(store, name, b"x")
    store.sync()
    fresh = make()
    assert sorted(fresh.names("runs/")) == ["runs/1-a", "runs/2-b"]
    assert sorted(fresh.names()) == ["runs-old/1-a", "runs/1-a", "runs/2-b", "started/7"]
    assert list(fresh.names("none/")) == []


def test_deleted_objects_are_gone_and_deleting_them_again_is_no_error(make):
    store = make()
    for name in ("1-a", "1-b", "1-c"):
        put(store, name, b"x")
    store.sync()
    for _ in range(2):
        store.delete(["1-a", "1-c", "never"])
        store.close()
    store.delete([])
    assert list(make().names()) == ["1-b"]
    with pytest.raises(CorruptionError):
        make().read("1-a", whole(b"x"))


def test_an_object_of_another_size_is_refused(make):
    store = make()
    put(store, "1-a", b"abcdef")
    store.sync()
    for extent in (Extent(0, 5, whole=True), Extent(0, 7, whole=True), Extent(4, 3, whole=False)):
        with pytest.raises(CorruptionError, match="has 6 bytes; the state needs"):
            make().read("1-a", extent)


def test_an_empty_object_is_an_object(make):
    store = make()
    put(store, "1-a", b"")
    store.sync()
    assert list(make().names()) == ["1-a"]
