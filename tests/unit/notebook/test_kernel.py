"""Notebooks in a real kernel: the example by nbclient, and what a front end would send by jupyter_client."""

import os
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from millstream.views.runs.control_files import active_runs

pytestmark = pytest.mark.thorough

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "clicks.ipynb"
PATIENCE_S = 240
DECLARED = """
import millstream as ms
import polars as pl
app = ms.App("ads", log="data", on_error="stop")
stream = app.topic("clicks", {"ad": str, "n": int}).stream()
stream.with_columns(share=pl.col("ad").cast(pl.Int64)).view("shares", key="n")
"""
SEND = """
with ms.connect("data") as log, log.producer() as producer:
    producer.send("clicks", {"ad": %r, "n": 1})
"""


@pytest.fixture(autouse=True)
def own_settings(tmp_path, monkeypatch):
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / ".ipython"))
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / ".runtime"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.delenv("MILLSTREAM_LOG", raising=False)


class Kernel:
    """A kernel, and a front end that sends it cells with their ids."""

    def __init__(self, manager, client):
        self.manager, self.client = manager, client
        self.updated = ""  # what displays were replaced with

    def run(self, code, cell):
        """Run a cell; return the texts that it showed: by the kind of message."""
        message = self.client.session.msg(
            "execute_request",
            {"code": code, "silent": False, "store_history": True, "allow_stdin": False},
            metadata={"cellId": cell},
        )
        self.client.shell_channel.send(message)
        shown = {"stdout": "", "stderr": "", "error": "", "result": ""}
        while True:
            got = self.client.get_iopub_msg(timeout=PATIENCE_S)
            if got["msg_type"] == "update_display_data":
                self.updated += got["content"]["data"]["text/plain"]
            if got["parent_header"].get("msg_id") != message["header"]["msg_id"]:
                continue
            content = got["content"]
            if got["msg_type"] == "stream":
                shown[content["name"]] += content["text"]
            elif got["msg_type"] == "error":
                shown["error"] += "\n".join(content["traceback"])
            elif got["msg_type"] in ("execute_result", "display_data"):
                shown["result"] += content["data"]["text/plain"]
            elif got["msg_type"] == "status" and content["execution_state"] == "idle":
                return shown

    def restart(self):
        self.manager.restart_kernel()
        self.client.wait_for_ready(timeout=PATIENCE_S)


@contextmanager
def kernel(folder):
    client_of = pytest.importorskip("jupyter_client.manager", reason="no Jupyter")
    manager, client = client_of.start_new_kernel(
        startup_timeout=PATIENCE_S, cwd=str(folder), extra_arguments=["--log-level=ERROR"]
    )
    try:
        yield Kernel(manager, client)
    finally:
        client.stop_channels()
        manager.shutdown_kernel()


def test_the_example_runs_and_shows_tables_a_drawing_and_a_plot(tmp_path):
    nbclient = pytest.importorskip("nbclient", reason="no nbclient")
    import nbformat

    notebook = nbformat.read(EXAMPLE, 4)
    nbclient.NotebookClient(
        notebook, timeout=PATIENCE_S, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert not [one for one in cell.outputs if one.output_type in ("stream", "error")]
            last = cell.source.splitlines()[-1].strip()
            shown[last] = [one.data for one in cell.outputs]
    assert "<svg" in shown["app"][0]["text/html"]
    assert "36 rows" in shown["view"][0]["text/html"]
    drawn = shown["view.plot()"][0]["application/vnd.vegalite.v5+json"]
    points = drawn["datasets"][drawn["data"]["name"]]
    assert len(points) == 36
    assert {"window_start", "n", "ad"} == set(points[0])
    assert "stopped" in shown["app.stop()"][0]["text/html"]


def test_a_cell_is_known_by_its_id_and_an_edit_takes_the_place_of_what_it_declared(tmp_path):
    with kernel(tmp_path) as jupyter:
        assert jupyter.run(DECLARED, "declared")["error"] == ""
        assert jupyter.run("app", "show")["result"].endswith("outputs shares)")
        edited = DECLARED.partition("stream =")[0] + "None"  # the app alone
        assert jupyter.run(edited, "app")["error"] == ""
        view = 'app.topic("clicks", {"ad": str}).stream().view(%r, key="ad")'
        assert jupyter.run(view % "one", "view")["error"] == ""
        assert jupyter.run(view % "two", "view")["error"] == ""
        assert jupyter.run("app", "show")["result"].endswith("outputs two)")
        shown = jupyter.run(view % "two", "third")["error"].splitlines()
        assert len(shown) == 2
        assert shown[0].startswith("In[7], line 1: app.topic(")
        assert shown[1].startswith(
            "ConfigError: Topic 'clicks' is declared twice, before in cell [5]"
        )


def test_a_failure_in_the_background_is_one_sentence_in_the_next_cell_and_only_there(tmp_path):
    with kernel(tmp_path) as jupyter:
        jupyter.run(DECLARED, "declared")
        assert jupyter.run("running = app.start()", "start")["error"] == ""
        # One cell, as the first that begins after the failure tells it.
        wait = "\nimport time\nwhile running.is_alive: time.sleep(0.1)"
        jupyter.run(SEND % "a" + wait, "send")
        told = jupyter.run("1 + 1", "next")
        waited = jupyter.run("2 + 2", "last")
        assert told["result"] == "2"
        assert told["stderr"].startswith("ads failed. ")
        assert "step 'with_columns(share)' failed" in told["stderr"]
        assert "Traceback" not in told["stderr"]
        assert (waited["stderr"], waited["result"]) == ("", "4")
        assert "failed" in jupyter.run("app.status", "status")["result"]


def test_a_kernel_that_is_restarted_leaves_nothing_and_the_app_starts_again(tmp_path):
    with kernel(tmp_path) as jupyter:
        jupyter.run(DECLARED, "declared")
        jupyter.run("running = app.start()", "start")
        assert len(active_runs(tmp_path / "data" / "apps" / "ads")) == 1
        jupyter.restart()
        assert not active_runs(tmp_path / "data" / "apps" / "ads")
        jupyter.run(DECLARED, "declared")
        assert jupyter.run("running = app.start()", "start")["error"] == ""
        jupyter.run(SEND % "7", "send")
        ends = time.monotonic() + PATIENCE_S
        while "shares 1" not in jupyter.run("app.status", "status")["result"]:
            assert time.monotonic() < ends
        assert (
            "1 row" in jupyter.run('view = ms.view("shares", log="data"); view', "view")["result"]
        )
        jupyter.run("view.close()", "close")
        while "No longer updated" not in jupyter.updated:
            jupyter.run("1", "other")
            assert time.monotonic() < ends
        last = jupyter.updated.partition("No longer updated")[0]
        assert "shares: 1 row" in last  # and it stays there
        os.kill(jupyter.manager.provisioner.pid, 9)  # as when the machine takes it away
        jupyter.restart()
        jupyter.run(DECLARED, "declared")
        assert jupyter.run("app.start().stop()", "start")["error"] == ""
        assert not active_runs(tmp_path / "data" / "apps" / "ads")
