"""Run every test with a client of others, and write what was run into docs/compatibility.md.

``python docs/compatibility.py`` runs those of ``tests/broker`` that are marked ``client``, which takes some
minutes. With ``--report FILE`` it takes what such a run has reported: ``pytest tests/broker --junitxml FILE``.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET  # the report is our own

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "compatibility.md"
OPENING = """# Which clients were run against the broker

Written by `python docs/compatibility.py` from what the tests in `tests/broker` did; each line is a test. Where
a test runs with several settings, their number is given. `make test-all` runs them again, with the
versions that it finds; franz-go only where it was built before, or with `MILLSTREAM_TEST_BUILDS=1`.

What Kafka offers and this broker does not is answered with Kafka's own errors, or not advertised:

| what | answer |
|---|---|
| ACLs | `SECURITY_DISABLED`, as without an authorizer |
| electing a leader | `ELECTION_NOT_NEEDED` |
| moving a partition to another broker or folder | `INVALID_REPLICA_ASSIGNMENT`, `LOG_DIR_NOT_FOUND`; to where it is: done |
| offsets in another tier | the earliest local one is the log start; of the latest tiered there is none |
| topic ids in Produce and Fetch, the consumer protocol of KIP-848, transactions of KIP-890 | not advertised: clients use the older ways |
| the quorum of controllers, quotas, delegation tokens, SCRAM, features, telemetry | not advertised: clients say that it is not supported |

Of the 56 integration tests in the sources of kafka-python 3.0.12, run against `millstream broker --auto-create
--partitions 4 --broker-id 0`, 52 pass and 2 are skipped by themselves. The other 2 ask for ACLs and for the quorum.

"""


class Case(NamedTuple):
    """One test with a client, and how often it ended how: "passed", "2 passed, 1 skipped"."""

    client: str
    version: str
    what: str
    result: str


def cases_of(report: Path) -> list[Case]:
    """Return what a report of pytest says of tests with clients."""
    results: dict[tuple[str, str], Counter[str]] = {}
    versions: dict[str, str] = {}
    for test in ET.parse(report).iter("testcase"):  # noqa: S314
        told = {one.get("name"): one.get("value", "") for one in test.iter("property")}
        client = told.get("client")
        if client is None:
            continue
        versions[client] = told.get("version", versions.get(client, "not told"))
        failed = test.find("failure") is not None or test.find("error") is not None
        skipped = test.find("skipped") is not None
        name = re.sub(r"\[.*", "", test.get("name", ""), flags=re.DOTALL)
        counted = results.setdefault((client, sentence(name)), Counter())
        counted["failed" if failed else "skipped" if skipped else "passed"] += 1
    return [
        Case(client, versions[client], what, described(counted))
        for (client, what), counted in results.items()
    ]


def sentence(test: str) -> str:
    """Return what the name of a test says."""
    return test.removeprefix("test_").replace("_", " ")


def described(results: Counter[str]) -> str:
    """Return how often a test ended how."""
    if list(results.values()) == [1]:
        return next(iter(results))
    return ", ".join(f"{count} {result}" for result, count in sorted(results.items()))


def written(cases: Iterable[Case]) -> str:
    """Return the document."""
    by_client: dict[str, list[Case]] = {}
    for case in sorted(cases, key=lambda case: case.client.lower()):
        by_client.setdefault(case.client, []).append(case)
    parts = [OPENING, "| client | version | tests | result |\n|---|---|---|---|\n"]
    for client, found in by_client.items():
        bad = [case for case in found if not re.fullmatch(r"(\d+ )?passed", case.result)]
        result = f"{len(bad)} not passed" if bad else "all passed"
        parts.append(f"| {client} | {found[0].version} | {len(found)} | {result} |\n")
    for client, found in by_client.items():
        parts.append(f"\n## {client}\n\n| what was run | result |\n|---|---|\n")
        parts += [f"| {case.what} | {case.result} |\n" for case in found]
    return "".join(parts)


def read_back(text: str) -> list[Case]:
    """Return the cases that a document tells of."""
    versions = dict(re.findall(r"(?m)^\| (.+?) \| (.+?) \| \d+ \| .+ \|$", text))
    cases = []
    for section in text.split("\n## ")[1:]:
        client, _, rest = section.partition("\n")
        for what, result in re.findall(r"(?m)^\| (.+?) \| (.+) \|$", rest)[1:]:
            cases.append(Case(client, versions[client], what, result))
    return cases


def main() -> int:
    """Run the tests, or read their report, and write the document."""
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--report", type=Path, help="what pytest has written, with --junitxml")
    report = options.parse_args().report
    with tempfile.TemporaryDirectory() as folder:
        if report is None:
            report = Path(folder) / "report.xml"
            pytest = [sys.executable, "-m", "pytest", "-q", "tests/broker", "-m", "client"]
            command = [*pytest, "--junitxml", report]
            all_of_them = {**os.environ, "MILLSTREAM_TEST_BUILDS": "1"}
            code = subprocess.run(command, cwd=ROOT, env=all_of_them, check=False).returncode  # noqa: S603
            if code not in {0, 1}:  # 1: some failed, and the document is to say so
                return code
        DOCUMENT.write_text(written(cases_of(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
