"""A job that asks a real service is killed between its durable steps: outputs have the answers of the journal."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from enrichment_kills import journal_of
from http_service import serving

import millstream as ms
from millstream import testing

HERE = Path(__file__).parent
SOURCE = Path(testing.__file__).parents[2]
COUNT = 300


def send(folder):
    with ms.connect(folder) as log:
        log.create_topic("clicks", partitions=3)
        with log.producer() as producer:
            for n in range(COUNT):
                producer.send("clicks", {"user": f"u{n}", "id": n}, key=f"u{n}")


def run(folder, service, point, number, stages):
    (folder / "marks").mkdir(exist_ok=True)
    program = [sys.executable, HERE / "enrichment_kills.py", folder, service]
    paths = [str(SOURCE), str(HERE), str(HERE.parent)]
    ended = subprocess.run(
        [*program, point, str(number), stages],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode in (0, -9), ended.stdout + ended.stderr
    assert "secret-word" not in ended.stdout + ended.stderr
    return ended.returncode


def outputs(folder):
    """What view and topic have, by user, each user once."""
    with ms.view("seen", log=folder) as view:
        seen = view.scan()
    with ms.connect(folder) as log:
        values = [log.read("found", n, columns=("value",))["value"].to_pylist() for n in (0, 1)]
        records = [json.loads(value) for of_partition in values for value in of_partition]
    told = [(record["user"], record["answer"]) for record in records]
    shown = seen.select("user", "answer").rows()
    for rows in (told, shown):
        assert len(rows) == len(dict(rows))
    return dict(shown), dict(told)


@pytest.mark.long
@pytest.mark.timeout(900)  # six times a JVM
def test_outputs_have_the_answers_of_the_journal_wherever_the_job_was_killed(tmp_path):
    send(tmp_path)
    given = {}

    def answer(request, number):  # another one each time
        given[request.target.rsplit("/", 1)[1]] = number
        return 200, {"answer": number}

    journaled = {}
    kills = [
        ("driver before journal", 6, "driver", -9),
        ("driver after journal", 3, "driver", -9),
        ("driver after topics", 1, "driver", -9),
        ("driver in commit", 2, "workers", -9),
        ("driver after commit", 1, "driver", -9),
        ("worker after stage", 1, "workers", 0),
    ]
    with serving(answer) as service:
        for point, number, stages, code in kills:
            assert run(tmp_path, service.url, point, number, stages) == code, point
            found = journal_of(tmp_path)
            assert found or point != "driver after journal"
            for user, told in found.items():
                assert journaled.setdefault(user, told) == told, (point, user)
            shown, told = outputs(tmp_path)
            assert shown.items() <= told.items(), point  # the topic may be one batch ahead
            for output in (shown, told):
                assert all(output.get(user, n) == n for user, n in journaled.items()), point
    shown, told = outputs(tmp_path)
    assert shown == told
    assert set(shown) == {f"u{n}" for n in range(COUNT)}
    assert len(journaled) > 20
    assert shown == given  # the last answers: what was stored is not asked for again
    assert not any(
        b"secret-word" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()
    )
