"""An HDFS of several namenodes and datanodes, and a gateway before it: what is asked of which, and what the death of one costs."""

import os

import pytest
from state_app import minutes, run, send

from millstream.errors import EnvironmentProblem
from millstream.object_store import client as client_module
from millstream.object_store.client import ObjectClient

DATA = os.urandom(300_000)
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


def test_the_namenode_in_standby_is_asked_once(new_standby_store):
    client = new_standby_store().client
    for number in range(5):
        client.put(f"1-{number}", memoryview(DATA))
        assert client.get(f"1-{number}").to_pybytes() == DATA
    assert len(list(client.names())) == 5
    assert client.counts.retries == 1


def test_a_gateway_names_what_is_not_allowed_and_what_is_not_there(
    hdfs_of_many, new_gateway_store, monkeypatch
):
    client = new_gateway_store().client
    client.put("a/1", memoryview(DATA))
    with pytest.raises(FileExistsError):
        client.put("a/1", memoryview(DATA[::-1]))
    assert client.get("a/1").to_pybytes() == DATA
    with pytest.raises(FileNotFoundError):
        client.get("a/2")
    assert client.size("a/2") is None
    client.put("b/1", memoryview(DATA))
    client.delete(["a/1"])
    client.delete_folders()
    assert list(client.names()) == ["b/1"]
    assert client.counts.retries == 0
    client_module.open_requests.cache_clear()
    monkeypatch.setenv("HADOOP_USER_NAME", "nobody-special")
    with pytest.raises(EnvironmentProblem, match=r"\(AccessControlException\).*HADOOP_USER_NAME"):
        ObjectClient("hdfs://both/forbidden").put("a", memoryview(b"x"))


def test_an_app_keeps_its_state_behind_a_gateway(new_gateway_store, tmp_path, monkeypatch):
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "app-cache"))
    url = new_gateway_store().client.url
    answers = []
    for folder, state in ((tmp_path / "near", None), (tmp_path / "far", url)):
        send(folder, 0, 1500)
        run(folder, state)
        send(folder, 1500, 3000)
        run(folder, state)
        answers.append(minutes(folder))
    assert answers[0] == answers[1]
    assert len(answers[0]) > 100


# The last of the file: what it kills stays dead.
def test_an_app_goes_on_when_a_datanode_dies_and_the_active_namenode(
    hdfs_of_many, url_in_many, tmp_path, monkeypatch
):
    monkeypatch.setenv("MILLSTREAM_CACHE", str(tmp_path / "app-cache"))
    before = ObjectClient("hdfs://both/before")
    for number in range(20):
        before.put(f"1-{number:02d}", memoryview(DATA))
    for folder in (tmp_path / "near", tmp_path / "far"):
        send(folder, 0, 3000)

    def kill(batch):
        if batch == 3:
            hdfs_of_many.kill("data-0")
        if batch == 7:
            hdfs_of_many.fail_over()

    assert run(tmp_path / "far", url_in_many, kill) >= 12
    run(tmp_path / "near", None)
    assert minutes(tmp_path / "far") == minutes(tmp_path / "near")
    for number in range(20):
        assert before.get(f"1-{number:02d}").to_pybytes() == DATA
    # The app goes on from what the dead left, by a client that has another order of addresses.
    client_module.open_requests.cache_clear()
    monkeypatch.setenv("MILLSTREAM_WEBHDFS", hdfs_of_many.addresses("a", "b"))
    for folder, state in ((tmp_path / "near", None), (tmp_path / "far", url_in_many)):
        send(folder, 3000, 4000)
        run(folder, state)
    assert minutes(tmp_path / "far") == minutes(tmp_path / "near")
