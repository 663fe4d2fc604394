"""The social timeline with a million follows: each of its four rules, against plain Python over what was written."""

import heapq
import importlib.util
import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

import millstream as ms

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "timeline.py"
PEOPLE, FOLLOWS, POSTS = 20_000, 1_000_000, 10_000
LATER_MS = 200_000_000  # after all posts that the example makes


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("timeline", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["timeline"] = module  # where a dataclass looks its types up
    spec.loader.exec_module(module)
    return module


class Network:
    """What was written, as sets of Python; who sees what is worked out anew each time."""

    def __init__(self, follows, posts):
        self.follows, self.posts = set(), {}
        for follower, followed, active in follows.rows():
            (self.follows.add if active else self.follows.discard)((follower, followed))
        for number, author, at_ms in posts.rows():
            if author is None:
                del self.posts[number]
            else:
                self.posts[number] = author, at_ms

    def followers(self, author):
        return {follower for follower, followed in self.follows if followed == author}

    def timelines(self, newest):
        by_author, seen = defaultdict(list), defaultdict(list)
        for number, (author, at_ms) in self.posts.items():
            by_author[author].append((-at_ms, author, number))
        for follower, followed in self.follows:
            seen[follower] += by_author[followed]
        return {
            follower: [(author, number) for _, author, number in heapq.nsmallest(newest, rows)]
            for follower, rows in seen.items()
            if rows
        }


def write(folder, topic, key, value):
    with ms.connect(folder) as log, log.producer() as producer:
        text = None if value is None else json.dumps(value).encode()
        producer.send(topic, text, key=str(key).encode()).result()


def maintained(example, folder):
    """Run to the end of the log; return each reader's timeline as the view has it."""
    example.pipeline(folder).run(until="caught-up", rows_per_batch=100_000, show=False)
    rows = ms.view("timeline", log=folder).scan().sort("follower", "place")
    found = defaultdict(list)
    for follower, place, author, number in rows.select(
        "follower", "place", "followed", "id"
    ).iter_rows():
        found[follower].append((author, number))
        assert place == len(found[follower])
    return dict(found)


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_the_four_rules_hold_with_a_million_follows(example, tmp_path):
    follows = example.follow_changes(PEOPLE, FOLLOWS, seed=1)
    posts = example.post_changes(PEOPLE, POSTS, seed=1)
    keys = {example.FOLLOWS: "follower", example.POSTS: "id"}
    example.fill(tmp_path, {example.FOLLOWS: follows, example.POSTS: posts}, keys)
    network = Network(follows, posts)

    def check():
        found = maintained(example, tmp_path)
        assert found == network.timelines(example.NEWEST)
        return found

    before = check()
    # 1. Somebody posts: the post is the first in the timelines of all followers.
    author, post, at_ms = 0, POSTS, example.FIRST_MS + LATER_MS  # who is followed by most
    network.posts[post] = author, at_ms
    write(tmp_path, example.POSTS, post, {"id": post, "author": author, "at_ms": at_ms})
    found = check()
    readers = {reader for reader, rows in found.items() if (author, post) in rows}
    assert readers == network.followers(author)
    assert all(found[reader][0] == (author, post) for reader in readers)
    assert len(readers) > PEOPLE // 5
    # 3. Somebody follows: what the other has posted appears.
    reader = next(person for person in range(PEOPLE) if person not in readers)
    network.follows.add((reader, author))
    follow = {"follower": reader, "followed": author}
    write(tmp_path, example.FOLLOWS, reader, {**follow, "active": True})
    assert check()[reader][0] == (author, post)
    # 4. Somebody unfollows: it disappears, and all is as it was.
    network.follows.remove((reader, author))
    write(tmp_path, example.FOLLOWS, reader, {**follow, "active": False})
    assert check()[reader] == before[reader]
    # 2. A post is deleted: it disappears from all timelines, and older posts take its place.
    del network.posts[post]
    write(tmp_path, example.POSTS, post, None)
    assert check() == before
