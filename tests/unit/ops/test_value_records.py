"""The records behind a row, compared with a model that leaves out one record after the other."""

from __future__ import annotations

import random
from collections import defaultdict
from datetime import timedelta

import pytest
from edited_app import EditedApp
from followed_clicks import MINUTE, SOURCE, START

import millstream as ms
from millstream.errors import ConfigError
from millstream.ops.value_records import records_behind
from millstream.views.store_location import open_state_store

KEYS = {
    "minutes": ("ad", "window_start"),
    "firsts": ("id",),
    "newest": ("ad",),
    "best": ("ad", "place"),
    "pairs": ("id", "cost", "other"),
}


def clicks(count, seed):
    dice = random.Random(seed)
    costs = dice.sample(range(-4, 2 * count), count)
    ads = [f"a{dice.randrange(2)}" for _ in range(count)]
    return [
        {
            "ad": ad,
            "id": f"{ad}-{dice.randrange(3)}",
            "cost": cost,
            "at": START + timedelta(seconds=4 * n),
        }
        for n, (ad, cost) in enumerate(zip(ads, costs, strict=True))
    ]


def model(rows):
    """Return the rows of each view by key, by the rules of the documentation."""
    found = defaultdict(dict)
    by_ad = defaultdict(list)
    for row in rows:
        by_ad[row["ad"]].append(row)
        found["firsts"].setdefault((row["id"],), (row["ad"], row["cost"]))
        found["newest"][row["ad"],] = (row["id"], row["cost"])
        if row["cost"] > 0:
            start = row["at"] - (row["at"] - START) % MINUTE
            n, cost = found["minutes"].get((row["ad"], start), (0, 0))
            found["minutes"][row["ad"], start] = (n + 1, cost + row["cost"])
            for other in rows:
                after = other["at"] - row["at"]
                if other["id"] == row["id"] and timedelta() <= after <= timedelta(seconds=5):
                    found["pairs"][row["id"], row["cost"], other["cost"]] = ()
    for ad, some in by_ad.items():
        for place, row in enumerate(sorted(some, key=lambda one: -one["cost"])[:2], 1):
            found["best"][ad, place] = (row["id"], row["cost"])
    return found


@pytest.mark.parametrize("partitions", [1, pytest.param(4, marks=pytest.mark.long)])
def test_the_records_behind_a_row_are_those_without_which_the_model_gives_another(
    tmp_path, partitions
):
    rows = clicks(14, seed=partitions)
    edited = EditedApp(tmp_path, partitions, 6, SOURCE, by_ad=True)
    edited.create()
    edited.append(rows)
    app = edited.write()
    edited.run(app)
    records, ends = [], defaultdict(int)
    for row in rows:
        partition = int(row["ad"][1:]) % partitions
        records.append(f"clicks/{partition}/{ends[partition]}")
        ends[partition] += 1
    whole = model(rows)
    without = [model(rows[:n] + rows[n + 1 :]) for n in range(len(rows))]
    with open_state_store(app.state_store, readonly=True) as store:
        views = {name: store.scan(name).to_dicts() for name in KEYS}
    examined = 0
    for view, names in KEYS.items():
        for row in views[view][:2]:
            key = {name: row[name] for name in names}
            named = tuple(key.values())
            found = records_behind(app, view, key)
            assert found.same, (view, key, found.sentences)
            wanted = {
                record
                for record, one in zip(records, without, strict=True)
                if one[view].get(named) != whole[view][named]
            }
            assert {one.record for one in found.records} == wanted, (view, key)
            for one in found.records:
                other = without[records.index(one.record)][view].get(named)
                assert (one.without is None) == (other is None)
            examined += 1
    assert examined > 5


def test_what_the_log_no_longer_has_is_said(tmp_path):
    edited = EditedApp(tmp_path, 1, 100, SOURCE)
    edited.create()
    rows = [
        {"ad": "a0", "id": "x", "cost": cost, "at": START + timedelta(seconds=90 * (cost == 9))}
        for cost in (1, 2, 3, 9)
    ]
    edited.append(rows)
    app = edited.write()
    edited.run(app)
    key = {"ad": "a0", "window_start": START}
    whole = records_behind(app, "minutes", key)
    assert [one.without["n"] for one in whole.records] == [2, 2, 2]
    assert [one.without["cost"] for one in whole.records] == [5, 4, 3]
    assert "without it n=2, cost=5" in whole.sentences[1]
    with ms.connect(edited.log) as log:
        log.delete_records("clicks", 0, 1)
    left = records_behind(app, "minutes", key)
    assert (left.same, len(left.records)) == (False, 2)
    assert "give window_start=" in left.notes[0]
    assert "The log holds only clicks/0 from offset 1 on" in left.notes[-1]
    with pytest.raises(ConfigError, match="has no row with"):
        records_behind(app, "minutes", {**key, "ad": "a9"})
    with pytest.raises(ConfigError, match="The key of the view 'minutes' is"):
        records_behind(app, "minutes", {"n": 3})
