"""Sets of GTIDs are what sets of pairs are, and read and written as the server does it."""

import mariadb_database
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.capture.mysql.gtid_sets import GtidSet
from millstream.errors import ConfigError

SOURCES = [f"{letter * 8}-1111-2222-3333-444444444444" for letter in "abc"]
pairs = st.sets(st.tuples(st.sampled_from(SOURCES), st.integers(1, 12)))


def made(members):
    found = GtidSet()
    for source, number in members:
        found.add(source, number)
    return found


def told(members):
    """Return a text that says the members, one by one."""
    return ",\n".join(f"{source.upper()}:{number}" for source, number in members)


def members_of(found):
    return {(source, number) for source in SOURCES for number in range(20) if (source, number) in found}  # fmt: skip


@given(st.permutations(range(1, 13)), pairs, pairs)
def test_a_set_has_its_members_whatever_their_order(order, one, other):
    first = made(sorted(one, key=lambda pair: order[pair[1] - 1]))
    second = GtidSet.parse(told(other))
    assert members_of(first) == one
    assert members_of(GtidSet.parse(str(first))) == one
    assert str(GtidSet.parse(told(one))) == str(first)
    left = first.minus(second)
    assert members_of(left) == one - other
    assert bool(left) == bool(one - other)
    for source in SOURCES:
        numbers = [number for its, number in one if its == source]
        assert first.end(source) == max(numbers, default=-1) + 1


@pytest.mark.parametrize(
    ("one", "other"),
    [("{a}:1-5:7:9-12,{b}:1", "{a}:2-3:7-10"), ("", "{a}:1"), ("{a}:1-3", "{a}:1-3"), ("{b}:4-9,{a}:2", "{b}:9")],
)  # fmt: skip
def test_the_server_takes_one_set_from_another_as_this_does(servers, one, other):
    names = dict(zip("abc", SOURCES, strict=True))
    one, other = one.format(**names), other.format(**names)
    if "mysql" not in servers:
        servers["mysql"] = mariadb_database.start("mysql")
    ((served, plain),) = servers["mysql"].run(
        f"SELECT GTID_SUBTRACT('{one}', '{other}'), GTID_SUBTRACT('{one}', '')"
    )
    assert str(GtidSet.parse(one).minus(GtidSet.parse(other))) == served.replace("\n", "")
    assert str(GtidSet.parse(one)) == plain.replace("\n", "")


def test_tags_are_refused():
    with pytest.raises(ConfigError, match=r"'tag' in 'aaaa.*without tags"):
        GtidSet.parse(f"{SOURCES[0]}:tag:1-3")
