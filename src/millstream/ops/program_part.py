"""A part of a program that is computed apart from the rest: where it ends, and what its steps are called there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from millstream.client.reader import Reader
from millstream.kernels.definition import canonical_text
from millstream.kernels.plan import JobPlan
from millstream.views.state_store.definition_comparison import whole_definition
from millstream.views.state_store.program import StoredProgram


def end_offsets(log: Reader, part: JobPlan, position: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return where to stop in each partition of the topics of a plan: where the app has read up to."""
    topics = {source.topic for source in part.sources}
    return {
        topic: [
            max(start, position.get(topic, {}).get(str(partition), start))
            for partition, (start, _) in enumerate(log.offsets(topic))
        ]
        for topic in topics
    }


def keys_in_part(program: StoredProgram, part: JobPlan) -> dict[str, str]:
    """Return the key that each step of a program has in a plan of a part of it."""
    parts = StoredProgram.of(part, program.partitioning)
    known, texts = (
        {key: canonical_text(whole_definition(step)) for key, step in one.steps.items()}
        for one in (parts, program)
    )
    keys = {text: key for key, text in known.items()}
    return {key: keys[text] for key, text in texts.items() if text in keys}
