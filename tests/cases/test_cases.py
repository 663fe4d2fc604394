"""The cases of the semantics, in process: one answer in any batches and in 1, 4 and 7 partitions."""

import pytest
from cases import dedup, joins, panes, patterns, process, sessions, tables, time, trends, windows
from cases.case import EVERY, PARTITIONS, run, trials_of
from truncated_hashes import not_when_cut

from millstream import testing

GROUPS = {
    "windows": windows.CASES,
    "sessions": sessions.CASES,
    "time": time.CASES,
    "transcripts": panes.TRANSCRIPTS,
    "late data": panes.LATE_DATA,
    "book": panes.BOOK,
    "dedup": dedup.CASES,
    "checked dedup": dedup.CHECKED,
    "joins": joins.CASES,
    "patterns": patterns.CASES,
    "process functions": process.CASES,
}
FILTERED = pytest.param("dedup", marks=not_when_cut("filters go by hashes alone"))
BATCHINGS = [
    *(pytest.param(seed, id=f"batching {seed}") for seed in range(2)),
    *(
        pytest.param(seed, id=f"batching {seed}", marks=mark)
        for mark, seeds in ((pytest.mark.thorough, range(2, 8)), (pytest.mark.long, range(8, 20)))
        for seed in seeds
    ),
]


@pytest.mark.parametrize("seed", BATCHINGS)
@pytest.mark.parametrize("group", [FILTERED, *(name for name in GROUPS if name != "dedup")])
def test_a_case_has_one_answer_whatever_the_batches_and_partitions(group, seed):
    # The first two batchings are tried in every number of partitions; the others take turns in them.
    turn = PARTITIONS[seed % 3 : seed % 3 + 1]
    batches, partitions = 1 + 3 * seed % 7, PARTITIONS if seed < 2 else turn
    if group == "book":  # its Ticks make many batches already
        batches, partitions = 1 + seed % 2, turn
    if group == "joins":
        partitions = PARTITIONS if EVERY else turn
    run(trials_of(GROUPS[group], partitions), batches=batches, seed=seed)


@pytest.mark.parametrize("seed", BATCHINGS)
def test_a_table_holds_after_each_step_what_was_published(seed):
    partitions = PARTITIONS if EVERY else PARTITIONS[(seed + 1) % 3 : (seed + 1) % 3 + 1]
    trials = tables.trials_of(tables.CASES, partitions)
    tables.run(trials, batches=1 + 3 * seed % 7, seed=seed, crash=seed % 2)


@pytest.mark.parametrize("seed", BATCHINGS)
def test_trends_and_alerts_are_what_was_published(seed):
    for partitions in PARTITIONS if EVERY else PARTITIONS[seed % 3 : seed % 3 + 1]:
        batches = 1 + 3 * seed % 7
        out = testing.run(
            trends.app(),
            trends.inputs(),
            batches=batches,
            partitions=partitions,
            seed=seed,
            crash=seed % 2,
        )
        trends.check(out)
