"""Commands that capture and apply, which a test kills; and accounts, whose sum no transaction changes."""

import random
import subprocess
import sys
import threading
import time

from millstream.client import connect

PAUSE = threading.Event()
ACCOUNTS = 20
TOTAL = 1000
# Money moves between rows of two tables; rows are made, moved to other keys and deleted; the sum stays.
TRANSFER = (
    "UPDATE a SET n = n - {x} WHERE id = {i}",
    "UPDATE b SET n = n + {x} WHERE id = {j}",
    "INSERT INTO a VALUES ({k}, {x}, '{text}')",
    "UPDATE b SET n = n - {x} WHERE id = {j}",
    "UPDATE a SET id = {k} + 1000, note = 'moved' WHERE id = {k}",
    "UPDATE a SET n = n + (SELECT n FROM a WHERE id = {k} + 1000) WHERE id = {i}",
    "DELETE FROM a WHERE id = {k} + 1000",
)


def schema():
    return (
        "CREATE TABLE a (id INTEGER PRIMARY KEY, n INTEGER NOT NULL, note TEXT)",
        "CREATE TABLE b (id INTEGER PRIMARY KEY, n INTEGER NOT NULL)",
        "INSERT INTO a VALUES "
        + ",".join(f"({i}, {TOTAL // ACCOUNTS}, 'x')" for i in range(ACCOUNTS)),
        "INSERT INTO b VALUES " + ",".join(f"({i}, 0)" for i in range(ACCOUNTS)),
    )


class Writer:
    """Writes transactions with ``execute``, which runs one statement, until it is stopped; use it in ``with``."""

    def __init__(self, execute, seed, begin="BEGIN"):
        self._execute, self._dice, self._begin = execute, random.Random(seed), begin
        self._stop, self.error, self.count = threading.Event(), None, 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()
        assert self.error is None, self.error

    def _run(self):
        try:
            while not self._stop.is_set():
                self._transaction()
                self.count += 1
                PAUSE.wait(0.01)
        except Exception as error:  # noqa: BLE001 - told to the test
            self.error = error

    def _transaction(self):
        dice = self._dice
        values = {
            "i": dice.randrange(ACCOUNTS),
            "j": dice.randrange(ACCOUNTS),
            "k": 100 + self.count % 500,
            "x": dice.randrange(50),
            "text": "long" * dice.choice([1, 2000]),
        }
        self._execute(self._begin)
        # The first two, or all of them, are a transfer; the sum is the same after either.
        for statement in TRANSFER[: dice.choice([2, 7])]:
            self._execute(statement.format(**values))
        self._execute(dice.choice(["COMMIT", "COMMIT", "COMMIT", "ROLLBACK"]))


def command(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "millstream", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_topic(folder, capture, timeout_s=250):
    """Wait until the capture has made the topic from which a copy is applied; before that, `apply` refuses."""
    until = time.monotonic() + timeout_s
    with connect(folder) as log:
        while "shop.transaction" not in log.topics():
            assert capture.poll() is None, capture.communicate()
            assert time.monotonic() < until, "the capture made no topic"
            PAUSE.wait(0.05)


def killed_applier(source, target, folder, look, *, kills, seed, disturb=lambda: None):
    """Apply with kills while ``source`` is captured; ``look`` returns rows of a and b, or None where there are none.

    The copy is looked at all the time: the sum is always that of the source. ``disturb`` is called between kills.
    """
    dice = random.Random(seed)
    capture = command("capture", source, "--to", folder, "--name", "shop")
    try:
        wait_for_topic(folder, capture)
        for _ in range(kills):
            applier = command("apply", "shop", target, "--log", folder)
            until = time.monotonic() + 90
            seen = None
            while time.monotonic() < until:
                found = look()
                if found is not None:
                    assert sum(n for rows in found for _, n, *_ in rows) == TOTAL
                    if seen is not None and found != seen:
                        break  # it has applied something
                    seen = found
                assert applier.poll() is None, applier.communicate()
                assert capture.poll() is None, capture.communicate()
                PAUSE.wait(0.02)
            else:
                raise AssertionError("nothing was applied for 90 s")
            PAUSE.wait(dice.uniform(0, 0.3))  # a moment of its life, whichever
            disturb()
            applier.kill()
            applier.communicate()
    finally:
        capture.terminate()
        capture.communicate()


def finish(source, target, folder):
    """Capture and apply what is left."""
    for arguments in (
        ("capture", source, "--to", folder, "--name", "shop"),
        ("apply", "shop", target, "--log", folder),
    ):
        process = command(*arguments, "--until", "caught-up")
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
