"""The runs of the tests: `run_tests.py test`, `test-all` or `test-long`, then arguments, if any.

`test` without arguments draws a part of the random examples, others each time, and `test-all` a quarter of
those of what it adds; `MILLSTREAM_TEST_EXAMPLES_PERCENT=100` draws all. With `--rest`, `test` leaves out what `make check`
runs, and `test-all` what `make test` runs. With other arguments it is pytest that gets them.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import services
import smoke
from processes import run, say, together, worst

REST = ["--rest"]
HOUSE_RULES = ("tests/unit/test_frame.py", "tests/unit/test_vocabulary.py")
WITHOUT_HOUSE_RULES = tuple(f"--ignore={name}" for name in HOUSE_RULES)
QUICK_TESTS = (
    "tests/unit",
    "tests/cases",
    "tests/contract",
    "tests/faults",
    "tests/simulation",
    "tests/soak",
)
LANES = Path(__file__).resolve().parents[1] / "tests" / "lanes"
# What `test-all` runs in each lane; `test-long` runs all.
LANES_IN_PART = {
    "one_bit_hashes": (
        "tests/unit/kernels/test_budget.py",
        "tests/unit/kernels/windows/test_count_windows.py",
        "tests/unit/kernels/dedup/test_dedup.py",
        "tests/unit/kernels/windows/test_panes.py",
        "tests/unit/kernels/test_repeated_batches.py",
        "tests/unit/kernels/sessions/test_sessions.py",
        "tests/unit/kernels/windows/test_sliding_windows.py",
        "tests/unit/kernels/windows/test_windowed_aggregates.py",
    ),
    "thresholds": (
        "tests/unit/kernels/state/test_keyed_rows.py",
        "tests/unit/kernels/windows/test_pane_folds.py",
        "tests/unit/kernels/sessions/test_session_model.py",
        "tests/unit/kernels/state/test_sorted_runs.py",
    ),
    "types": ("tests/unit/pipeline/test_column_types.py",),
}
HISTORIES_OF_JOINS = (
    "tests/unit/kernels/joins/test_join_histories.py",
    # Of rows that may be taken back: the same number, a hundred at a time.
    "tests/unit/kernels/joins/test_signed_interval_join.py",
    "tests/unit/kernels/test_final_rows.py",
    "tests/unit/kernels/test_given_rows.py",
)
MACHINES = "tests/spark/test_machines.py"
JOIN_HISTORIES = 10_000
PATTERNS = 20_000
PUBLISHED_CASES = ("tests/cases/test_cases.py", "tests/published", "tests/spark/test_cases.py")
# One process more than there are cores, as many tests wait: for a disk, a server, another process.
SIDE_BY_SIDE = ("-n", str(min(4, (os.cpu_count() or 1) + 1)), "--dist", "worksteal")
# The processes take all cores: threads of polars would only wait for each other (a quarter of the CPU).
ONE_THREAD_EACH = {"POLARS_MAX_THREADS": "1"}
FEW_EXAMPLES = {"MILLSTREAM_TEST_EXAMPLES_PERCENT": "15"}
QUARTER_OF_EXAMPLES = {"MILLSTREAM_TEST_EXAMPLES_PERCENT": "25"}
# Each process may have two JVMs and a cluster at a time: three, and the thorough tests, took 8 GiB.
FILES_PROCESSES = 3 if os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") > 12 * 2**30 else 2
# A session of Spark belongs to a file. The order of files is that of tests/conftest.py.
FILES_SIDE_BY_SIDE = ("-n", str(FILES_PROCESSES), "--dist", "loadfile", "--no-loadscope-reorder")


def pytest(
    *arguments: str, env: dict[str, str] | None = None, output: IO[str] | None = None
) -> int:
    """Run pytest and return its exit code; of the variables, what the user has set stands."""
    command = [sys.executable, "-m", "pytest", "-q", *arguments]
    return run(command, {**(env or {}), **os.environ}, output)


def test(arguments: list[str]) -> int:
    """Run the tests that need no Spark, the simulation, and a few quick tests on Spark."""
    if arguments not in ([], REST):
        return pytest(*arguments)
    env = {**ONE_THREAD_EACH, **FEW_EXAMPLES}
    left_out = WITHOUT_HOUSE_RULES if arguments else ()
    unit = (*QUICK_TESTS, *left_out, "-m", "not thorough and not long", *SIDE_BY_SIDE)
    return together(
        lambda: pytest(*unit, env=env),
        lambda output: pytest("tests/spark", "-m", "quick", env=env, output=output),
    )


def test_all(arguments: list[str]) -> int:
    """Run every test, and the smoke tests on other versions of the libraries."""
    skipped = services.install()
    if arguments in ([], REST):
        first = 0 if arguments else test([])
        code = worst(first, the_rest(), *(in_lane(*lane) for lane in LANES_IN_PART.items()))
    else:
        code = worst(pytest("-m", "not long", *arguments, "tests"), smoke.run())
    for line in skipped:
        say(f"skipped: {line}")
    return code


def the_rest() -> int:
    """Run what `make test` leaves out, and the smoke tests."""
    others = [argument for folder in QUICK_TESTS for argument in ("--ignore", folder)]
    thorough = (*QUICK_TESTS, "-m", "thorough and not long", "-n", "1")
    chosen = ("-m", "not quick and not long", *FILES_SIDE_BY_SIDE)
    return together(
        lambda: pytest("tests", *others, *chosen, env=QUARTER_OF_EXAMPLES),
        lambda output: worst(
            pytest(*thorough, env={**ONE_THREAD_EACH, **QUARTER_OF_EXAMPLES}, output=output),
            smoke.run(output),
        ),
    )


def test_long(arguments: list[str]) -> int:
    """Run the tests that need no service in every lane, where what is rare in the code is made common.

    Then, without arguments, ten thousand histories of each kind of join, random patterns, the published cases in every batching
    and number of partitions, also on Spark, captures that are killed 50 times, what takes long or wants programs that
    take long to build (YARN, images, Kubernetes), and machines without a common disk, from which S3 is cut off for a minute.
    """
    tests = arguments or [*QUICK_TESTS, *WITHOUT_HOUSE_RULES]
    lanes = [in_lane(lane.stem, tests, {}) for lane in sorted(LANES.glob("*.py"))]
    if arguments:
        return worst(*lanes)
    return worst(
        *lanes,
        captures_killed_often(),
        histories_of_joins(),
        every_batching(),
        random_patterns(),
        platforms(),
        cut_off_machines(),
    )


def captures_killed_often() -> int:
    """Kill each capture 50 times, and its server 5 times, under a random workload."""
    services.install()
    return pytest("tests/unit/capture", "-k", "test_1_2_", env={"MILLSTREAM_CAPTURE_KILLS": "50"})


def histories_of_joins() -> int:
    """Run very many histories of each kind of join against plain Python."""
    say(f"{JOIN_HISTORIES} histories of each kind of join")
    env = {**ONE_THREAD_EACH, "MILLSTREAM_JOIN_HISTORIES": str(JOIN_HISTORIES)}
    return pytest(*HISTORIES_OF_JOINS, *SIDE_BY_SIDE, env=env)


def random_patterns() -> int:
    """Match very many random patterns of events, and compare with a naive model."""
    say(f"{PATTERNS} random patterns")
    env = {**ONE_THREAD_EACH, "MILLSTREAM_TEST_PATTERNS": str(PATTERNS)}
    return pytest("tests/unit/kernels/patterns/test_pattern_model.py", *SIDE_BY_SIDE, env=env)


def cut_off_machines() -> int:
    """Run all tests of machines without a common disk, from which S3 is cut off for a minute."""
    return pytest(MACHINES, env={"MILLSTREAM_CUT_S": "60"})


def platforms() -> int:
    """Install what the long tests want, and run them; say what is missing."""
    missing = [*services.install(), *services.install_platforms()]
    code = pytest("tests", "-m", "long", "--ignore", MACHINES)
    for line in missing:
        say(f"missing: {line}")
    return code


def in_lane(lane: str, tests: Sequence[str], few: dict[str, str] = FEW_EXAMPLES) -> int:
    """Run tests in one lane of `tests/lanes`."""
    say(f"the tests in the lane of {lane}")
    return pytest(*tests, "--lane", lane, *SIDE_BY_SIDE, env={**ONE_THREAD_EACH, **few})


def every_batching() -> int:
    """Run the published cases in 20 batchings of topics of 1, 4 and 7 partitions, in process and on Spark."""
    say("the published cases in every batching and number of partitions")
    env = {**ONE_THREAD_EACH, "MILLSTREAM_EVERY_BATCHING": "1"}
    return pytest(*PUBLISHED_CASES, *FILES_SIDE_BY_SIDE, env=env)


RUNS = {"test": test, "test-all": test_all, "test-long": test_long}

if __name__ == "__main__":
    sys.exit(RUNS[sys.argv[1]](sys.argv[2:]))
