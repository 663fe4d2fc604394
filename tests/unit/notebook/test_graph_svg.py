import re
from xml.etree import ElementTree as ET

from millstream.notebook.graph_svg import graph_svg

SVG = "{http://www.w3.org/2000/svg}"


def node(identity, kind="step", name=None):
    return {"id": identity, "kind": kind, "name": name or identity}


def drawn(nodes, edges):
    """Return the place of each node by its name, and the lines between places."""
    edges = [{"from": a, "to": b, "late": late} for a, b, late in edges]
    root = ET.fromstring(graph_svg({"nodes": nodes, "edges": edges}))
    places = {}
    for group in root.findall(f"{SVG}g"):
        x, y = re.fullmatch(r"translate\((\S+) (\S+)\)", group.get("transform")).groups()
        places[group.find(f"{SVG}title").text] = (float(x), float(y))
    lines = [path for path in root.findall(f"{SVG}path") if path.get("fill") == "none"]
    return root, places, lines


def test_every_node_has_its_own_place_right_of_what_it_takes():
    nodes = [node(name) for name in "abcdef"]
    edges = [
        ("a", "b", False),
        ("a", "c", False),
        ("b", "d", False),
        ("c", "d", False),
        ("e", "d", True),
    ]
    _, places, lines = drawn(nodes, [*edges, ("d", "f", False)])
    assert len(set(places.values())) == 6
    assert all(places[a][0] < places[b][0] for a, b, _ in edges)
    assert len(lines) == 6
    assert [line.find(f"{SVG}title") is not None for line in lines].count(True) == 1


def test_one_node_alone_is_drawn():
    _, places, lines = drawn([node("a")], [])
    assert places == {"a": (0, 0)}
    assert lines == []


def test_names_are_text_and_long_ones_are_cut_with_the_whole_in_a_title():
    name = "filter(<b>one</b>, two and three, four and five, six & seven, eight)"
    root, places, _ = drawn([node("a", "view", name)], [])
    assert [*places] == [name]
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert texts[0] == "view"
    assert len(texts) == 3
    assert texts[2].endswith("…")
    assert all(len(text) <= 21 for text in texts)
