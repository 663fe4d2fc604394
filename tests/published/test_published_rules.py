"""Random pipelines give what the published rules say, in any batches and after crashes.

Each seed draws an app of one to three chains of steps and windows, some records, and what every view
must hold in the end; see rules.py. A failure names its seed: ``draw(seed)`` makes the same again.
"""

import os
import random

import pytest
from published.pipelines import Draw, close, instant

from millstream import testing

PIPELINES = int(os.environ.get("MILLSTREAM_TEST_PIPELINES", "60"))
FIRST = int(os.environ.get("MILLSTREAM_TEST_FIRST_PIPELINE", "0"))
CHUNK = 20


@pytest.mark.parametrize("first", range(FIRST, FIRST + PIPELINES, CHUNK))
def test_random_pipelines_give_what_the_published_rules_say(first):
    problems = [text for seed in range(first, first + CHUNK) for text in differences(seed)]
    assert not problems, "\n".join(problems)


def differences(seed):
    pipeline = Draw(seed).pipeline()
    dice = random.Random(-seed - 1)
    rows = {"t": pipeline.inputs()}
    for batches, crash in ((1, 0), (dice.choice([2, 5, 12]), dice.choice([0, 0, 2]))):
        out = testing.run(pipeline.app, rows, batches=batches, crash=crash, seed=dice.randrange(99))
        found = list(compared(pipeline, out))
        if found:
            yield "\n  ".join([f"seed {seed}, batches {batches}:", *pipeline.said, *found])
            return


def compared(pipeline, out):
    for name, outcome in pipeline.outcomes.items():
        yield from rows_differ(name, out[name], outcome)
    if out.dead.height != pipeline.dead:
        yield f"{out.dead.height} dead letters, not {pipeline.dead}"
    for step, late in pipeline.steps.items():
        lines = out.ledger.filter(step=step) if out.ledger.width else out.ledger
        told = int(lines["late"].sum()) if lines.height else 0
        if told != late:
            yield f"{step}: {told} late, not {late}"


def rows_differ(name, table, outcome):
    if not table.width:
        table_rows = {}
    else:
        table_rows = {
            tuple(row[c] for c in outcome.key): row
            for row in table.select(outcome.columns).iter_rows(named=True)
        }
    times = ("window_start", "window_end")
    meant = {}
    for row in outcome.rows:
        values = {c: row.values[c] for c in outcome.columns}
        values |= {c: instant(values[c]) for c in times if c in values}
        meant[tuple(values[c] for c in outcome.key)] = values
    for key in meant.keys() - table_rows.keys():
        yield f"{name}: no row {meant[key]}"
    for key in table_rows.keys() - meant.keys():
        yield f"{name}: a row too many: {table_rows[key]}"
    for key in meant.keys() & table_rows.keys():
        for column, value in meant[key].items():
            if not close(table_rows[key][column], value):
                yield f"{name}: {key}: {column} is {table_rows[key][column]!r}, not {value!r}"
