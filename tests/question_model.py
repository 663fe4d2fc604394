"""An app whose state is asked, and what the answers must be: computed anew from all records up to a position.

The naive side knows records, and the rules of the documents: a window is open while the watermark has not reached its end
and the lateness; the watermark is the least over the partitions of the greatest time less the delay.
"""

import random
from collections import defaultdict
from datetime import UTC, datetime, timedelta
from itertools import groupby

import polars as pl

import millstream as ms
from millstream.client import connect

START = datetime(2026, 1, 1, tzinfo=UTC)
DELAY_S, GAP_S, LATENESS_S = 120, 40, 30
CLICK = {"ad": int, "user": str, "at": datetime, "cost": int}
ADS, USERS = range(6), ["ann", "bob", "cid", "dan", "eva"]
STEPS = {  # each with the columns of its key
    "minutes": ("ad",),
    "updated": ("ad", "user"),
    "by_two": ("ad",),
    "retracted": ("ad",),
    "hops": ("ad",),
    "visits": ("user",),
    "threes": ("ad",),
    "totals": ("user",),
    "best": ("ad",),
    "people": ("user",),
    "joined": ("user",),
    "counter": ("user",),
    "kinds": ("ad", "user"),
}


class Counted(ms.ProcessFunction):
    clicks = ms.value_state(pl.Int64, default=0)
    ads = ms.map_state(pl.Int64, pl.Int64)

    def on_row(self, context, row):
        context.state.clicks += 1
        context.state.ads[row["ad"]] = context.state.ads.get(row["ad"], 0) + row["cost"]


def question_app(log, **options):
    """Declare the app; its views have the names of STEPS."""
    app = ms.App("asked", log=log, **options)
    clicks = app.topic("clicks", CLICK, key="ad").stream(
        time="at", watermark=ms.watermark(f"{DELAY_S} seconds"), lateness=f"{LATENESS_S} seconds"
    )
    aggregates = {"n": ms.count(), "cost": ms.sum("cost")}
    minute = clicks.window(ms.tumbling("1 minute"), by="ad")
    minute.agg(**aggregates).view("minutes")
    clicks.window(ms.tumbling("1 minute"), by=["ad", "user"]).emit("update").agg(**aggregates).view(
        "updated"
    )
    minute.emit("update", early=ms.after_count(2)).agg(**aggregates).view("by_two")
    minute.emit("retract").agg(**aggregates).view("retracted")
    clicks.window(ms.hopping("2 minutes", "1 minute"), by="ad").agg(**aggregates).view("hops")
    clicks.window(ms.session(f"{GAP_S} seconds"), by="user").agg(**aggregates).view("visits")
    clicks.window(ms.count_window(3, unbounded=True), by="ad").agg(**aggregates).view("threes")
    totals = clicks.group_by("user", name="sums").agg(
        n=ms.count(), least=ms.min("cost"), ads=ms.distinct("ad")
    )
    totals.view("totals")
    clicks.top(2, by="cost", per="ad", rank="rank").view("best", key=["ad", "rank"])
    people = app.table("people-topic", {"user": str, "city": str}, key="user")
    people.view("people")
    totals.join(people, on="user", how="left", name="with city").view("joined", key="user")
    clicks.process(
        Counted(), by="user", schema={"user": pl.String}, order="arrival", name="counter"
    ).view("counted", key="user")
    clicks.select("ad", "user").group_by("ad", "user", name="pairs").agg(n=ms.count()).filter(
        pl.col("n") > 1
    ).with_columns(twice=pl.col("n") * 2).view("kinds")

    @app.question("everything")
    def everything(state, names):
        return {name: state.rows(name) for name in names}

    @app.question("city_of")
    def city_of(state, ad):
        users = state.rows(
            "kinds", pl.DataFrame([(ad, user) for user in USERS], ["ad", "user"], orient="row")
        )
        return sorted(state.rows("people", users["user"])["city"].to_list())

    return app


def draw_records(seed, count, partitions):
    """Draw records by topic and partition: clicks of a rising clock, none of them late, and people who move and go."""
    dice = random.Random(seed)
    clicks, people = defaultdict(list), defaultdict(list)
    for number in range(count):
        at = START + timedelta(seconds=number * 4 + dice.randint(0, DELAY_S - 5))
        click = {
            "ad": dice.choice(ADS),
            "user": dice.choice(USERS),
            "at": at,
            "cost": dice.randint(1, 30),
        }
        clicks[dice.randrange(partitions)].append(click)
        if dice.random() < 0.2:
            user = dice.choice(USERS)
            city = None if dice.random() < 0.3 else dice.choice(["Ulm", "Kiel", "Graz"])
            people[USERS.index(user) % partitions].append((user, city))
    return {"clicks": clicks, "people-topic": people}


def write_records(log, records, partitions):
    with connect(log) as opened:
        for topic in records:
            opened.create_topic(topic, partitions=partitions)
        with opened.producer() as producer:
            for partition, clicks in records["clicks"].items():
                for click in clicks:
                    value = {**click, "at": click["at"].isoformat()}
                    producer.send("clicks", value, key=str(click["ad"]), partition=partition)
            for partition, people in records["people-topic"].items():
                for user, city in people:
                    value = None if city is None else {"user": user, "city": city}
                    producer.send("people-topic", value, key=user, partition=partition)


class Expected:
    """What the answers are at a position, by the rules alone."""

    def __init__(self, records, position, partitions):
        read = {
            topic: {
                p: found[: int(position.get(topic, {}).get(str(p), 0))]
                for p, found in parts.items()
            }
            for topic, parts in records.items()
        }
        self.by_partition = read["clicks"]
        self.clicks = [click for part in sorted(read["clicks"]) for click in read["clicks"][part]]
        ends = [
            max((c["at"] for c in read["clicks"].get(p, ())), default=None)
            for p in range(partitions)
        ]
        self.watermark = None if None in ends else min(ends) - timedelta(seconds=DELAY_S)
        self.cities = {}
        for people in read["people-topic"].values():
            for user, city in people:
                self.cities[user] = city
        self.cities = {user: city for user, city in self.cities.items() if city is not None}

    def rows(self, name):
        found = getattr(self, f"_{name}")()
        return sorted(map(_row, found), key=repr)

    def _is_open(self, end):
        return self.watermark is None or end + timedelta(seconds=LATENESS_S) > self.watermark

    def _windows(self, keys, size_s, slide_s):
        sums = defaultdict(lambda: [0, 0])
        for click in self.clicks:
            first = int((click["at"] - START).total_seconds()) // slide_s * slide_s
            for begin in range(first, first - size_s, -slide_s):
                entry = sums[begin, *(click[key] for key in keys)]
                entry[0] += 1
                entry[1] += click["cost"]
        for (begin, *key), (n, cost) in sums.items():
            start = START + timedelta(seconds=begin)
            end = start + timedelta(seconds=size_s)
            if self._is_open(end):
                named = dict(zip(keys, key, strict=True))
                yield {"window_start": start, "window_end": end, **named, "n": n, "cost": cost}

    def _minutes(self):
        return self._windows(["ad"], 60, 60)

    _by_two = _retracted = _minutes

    def _updated(self):
        return self._windows(["ad", "user"], 60, 60)

    def _hops(self):
        return self._windows(["ad"], 120, 60)

    def _visits(self):
        gap = timedelta(seconds=GAP_S)
        for user, clicks in self._by("user"):
            ordered = sorted(clicks, key=lambda click: click["at"])
            session = [ordered[0]]
            for click in [*ordered[1:], None]:
                if click is not None and click["at"] <= session[-1]["at"] + gap:
                    session.append(click)
                    continue
                end = session[-1]["at"] + gap
                expires = end + timedelta(seconds=LATENESS_S)
                if self.watermark is None or expires >= self.watermark:
                    yield {
                        "window_start": session[0]["at"],
                        "window_end": end,
                        "user": user,
                        **_sums(session),
                        "overlaps_closed": False,
                    }
                session = [click]

    def _threes(self):
        """Only what does not depend on the order in which partitions were read."""
        for ad, clicks in self._by("ad"):
            if len(clicks) % 3:
                yield {"ad": ad, "n": len(clicks) % 3}

    def _totals(self):
        for user, clicks in self._by("user"):
            costs = [click["cost"] for click in clicks]
            yield {
                "user": user,
                "n": len(costs),
                "least": min(costs),
                "ads": len({click["ad"] for click in clicks}),
            }

    def _best(self):
        for _, clicks in self._by("ad"):
            ordered = sorted(clicks, key=lambda c: (-c["cost"], c["user"], c["at"]))
            for rank, click in enumerate(ordered[:2], 1):
                yield {**click, "rank": rank}

    def _people(self):
        return [{"user": user, "city": city} for user, city in self.cities.items()]

    def _joined(self):
        return [{**row, "city": self.cities.get(row["user"])} for row in self._totals()]

    def _counter(self):
        for user, clicks in self._by("user"):
            ads = {ad: sum(c["cost"] for c in some) for ad, some in _grouped(clicks, "ad")}
            yield {"user": user, "clicks": len(clicks), "ads": ads}

    def _kinds(self):
        for ad, clicks in self._by("ad"):
            for user, some in _grouped(clicks, "user"):
                if len(some) > 1:
                    yield {"ad": ad, "user": user, "n": len(some), "twice": 2 * len(some)}

    def _by(self, column):
        return _grouped(self.clicks, column)


def _grouped(clicks, column):
    ordered = sorted(clicks, key=lambda click: click[column])
    return [(key, list(some)) for key, some in groupby(ordered, lambda click: click[column])]


def _sums(clicks):
    return {"n": len(clicks), "cost": sum(click["cost"] for click in clicks)}


def answered_rows(name, frame):
    """Return the rows of an answer in the form of the expected ones."""
    rows = frame.to_dicts()
    if name == "threes":
        rows = [{"ad": row["ad"], "n": row["n"]} for row in rows]
    if name == "counter":
        rows = [{**row, "ads": {one["key"]: one["value"] for one in row["ads"]}} for row in rows]
    return sorted(map(_row, rows), key=repr)


def _row(row):
    return {
        name: row[name] if not isinstance(row[name], dict) else dict(sorted(row[name].items()))
        for name in sorted(row)
    }
