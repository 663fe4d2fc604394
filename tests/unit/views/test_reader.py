"""Views are found by name in a log folder, and errors list what there is."""

from __future__ import annotations

import polars as pl
import pytest

from millstream.errors import ConfigError, OffsetOutOfRangeError, UnknownViewError
from millstream.views.reader import state_store_path, view
from millstream.views.state_store.sqlite_store import SqliteStateStore
from millstream.views.state_store.store import Fence, ViewChange, ViewSchema


def _fill(log, app: str, *names: str) -> None:
    with SqliteStateStore(state_store_path(log, app)) as store:
        run, batch_id = store.begin_run(app, "main", "c")
        for name in names:
            store.declare(ViewSchema(name, (("k", "int"), ("n", "int")), ("k",)))
        changes = [ViewChange(name, pl.DataFrame({"k": [1, 2], "n": [3, 4]})) for name in names]
        store.commit(
            Fence(app, "main", run, batch_id), changes, position={"t": [2]}, status={"ok": True}
        )


def test_a_view_is_found_among_the_apps_of_a_folder(tmp_path):
    _fill(tmp_path, "ads", "ctr", "totals")
    _fill(tmp_path, "other", "sales")
    with view("ctr", log=tmp_path) as opened:
        assert repr(opened) == "View('ctr', app='ads')"
        assert opened.get(k=2) == {"k": 2, "n": 4}
        assert opened.scan().rows() == [(1, 3), (2, 4)]
        assert opened.scan(where={"n": 4}).height == 1
        assert opened.changes(since=1).height == 1
        assert opened.position == {"t": [2]}
        assert opened.schema.key == ("k",)
        assert opened.wait_for(batch_id=0, position={"t": [2]})


def test_an_ambiguous_or_unknown_view_is_explained(tmp_path):
    with pytest.raises(UnknownViewError, match="none yet"):
        view("ctr", log=tmp_path)
    _fill(tmp_path, "ads", "ctr")
    _fill(tmp_path, "ads2", "ctr")
    with pytest.raises(ConfigError, match=r"Several apps have a view 'ctr': ads, ads2"):
        view("ctr", log=tmp_path)
    with view("ctr", log=tmp_path, app="ads2") as opened:
        assert opened.app == "ads2"
    with pytest.raises(UnknownViewError, match="ads/ctr, ads2/ctr"):
        view("crt", log=tmp_path)
    with pytest.raises(UnknownViewError, match=r"no views of an app 'adz'; .*: ads, ads2"):
        view("ctr", log=tmp_path, app="adz")


def test_changes_of_a_view_that_was_made_anew_are_not_gone_on_with(tmp_path):
    schema = ViewSchema("numbers", (("k", "int"),), ("k",))
    path = state_store_path(tmp_path, "app")

    def filled(checkpoint_id, count):
        with SqliteStateStore(path) as store:
            store.declare(schema)
            run, _ = store.begin_run("app", "main", checkpoint_id)
            rows = pl.DataFrame({"k": range(count)})
            store.commit(
                Fence("app", "main", run, 0), [ViewChange("numbers", rows)], position={}, status={}
            )

    filled("one", 3)
    with view("numbers", tmp_path) as opened:
        assert opened.changes(since=1)["_seq"].to_list() == [2, 3]
        for file in path.parent.iterdir():
            file.unlink()
        with pytest.raises(ConfigError, match="cannot be opened"):
            opened.scan()
        filled("two", 5)
        assert opened.scan().height == 5
        with pytest.raises(
            OffsetOutOfRangeError, match=r"since 3 .* created again.*newest change is 5"
        ):
            opened.changes(since=3)
        assert opened.changes(since=0).height == 5
        assert opened.changes(since=5).height == 0
