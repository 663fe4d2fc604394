"""The graph that is drawn of a pipeline is the one that was declared."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime

import polars as pl

import millstream as ms
from millstream.views.commit.pipeline_graph import pipeline_graph


@dataclass
class Event:
    ad: str
    at: datetime


def drawn(app):
    graph = json.loads(json.dumps(pipeline_graph(app.plan())))
    names = {node["id"]: node["name"] for node in graph["nodes"]}
    assert len(set(names)) == len(graph["nodes"])
    edges = {(names[e["from"]], names[e["to"]], e["late"]) for e in graph["edges"]}
    assert len(edges) == len(graph["edges"])
    return graph["nodes"], edges


def test_every_kind_of_node_and_edge_is_drawn_once(tmp_path):
    app = ms.App("app", log=tmp_path, views="postgresql://user:secret@localhost/db")
    one, two = (app.topic(name, Event).stream(time="at", late="side") for name in ("one", "two"))
    both = one.union(two).filter(pl.col("ad") != "", name="named")
    counts = both.window(ms.tumbling("1 minute"), by="ad").agg(n=ms.count())
    counts.view("counts")
    counts.to("counted", key="ad")
    counts.dataset(tmp_path / "files")
    counts.foreach(print, name="say")
    counts.late.view("late_ones", key="ad", store="sqlite")
    nodes, edges = drawn(app)
    window = "tumbling(1 minute) by ad"
    assert edges == {
        ("one", "named", False),
        ("two", "named", False),
        ("named", window, False),
        (window, "counts", False),
        (window, "to(counted)", False),
        (window, "dataset(files)", False),
        (window, "foreach(say)", False),
        (window, "late_ones", True),
    }
    assert {(node["name"], node["kind"]) for node in nodes} == {
        ("one", "topic"),
        ("two", "topic"),
        ("named", "step"),
        (window, "operator"),
        ("counts", "view"),
        ("to(counted)", "topic"),
        ("dataset(files)", "dataset"),
        ("foreach(say)", "function"),
        ("late_ones", "view"),
    }
    assert "secret" not in json.dumps(nodes)
    assert [node["step"] for node in nodes] == list(app.plan().steps)
