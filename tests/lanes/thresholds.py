"""The lane of lowered thresholds: what is done once there is much, is done for next to nothing.

Every size at which the code takes another way, without its answer changing, stands here with the least
value at which it still works. What limits what may be asked for (a record's size, a number of members)
and what paces waiting is no such size. A constant that is no longer there fails the run.
"""

import importlib
import sys
from types import ModuleType

import pytest

LOWERED: dict[str, dict[str, float]] = {
    "client.producer": {"BULK_ROWS": 3},
    "kernels.arriving_ids": {"_ROUNDS_MAX": 1},
    "kernels.bloom_generations": {"_MOVES": 1},
    "kernels.count_windows": {"_SLOTS_PER_TIMEOUT": 1},
    "kernels.dead_records": {"_FAR_APART": 1},
    "kernels.decode.json_values": {
        "_BLOCK_BYTES": 64,
        "_BY_ROW_MAX": 1,
        "_PARTS": 2,
        "_STRETCH_MIN": 1,
    },
    "kernels.frames": {"_SPARE_BYTES": 1},
    "kernels.hash_order": {"_WINDOWS_MAX": 1},
    "kernels.kept_ids": {"_SLOTS": 2, "_SLOT_US_MIN": 1},
    "kernels.session_batch": {"_SLOT_CLOCK_MS": 1},
    "kernels.sessions": {"_SLOTS_PER_GAP": 1},
    "kernels.sliding": {"_SLOTS_PER_SIZE": 1},
    "kernels.sorted_runs": {"PART_ROWS": 2, "_SAMPLES": 1},
    "kernels.window_step": {"SLOTS_OPEN_MAX": 1, "_SAMPLED_MIN": 1},
    "log.archive": {"ROWS_PER_GROUP": 2},
    "log.batch": {"_COPIED_BYTES_MAX": 1},
    "log.batches": {"_BLOCK_BYTES": 1, "_PLACES_MAX": 1, "_SEARCH_BYTES": 1},
    "log.boundaries": {"_GUESS_BYTES": 3, "_GUESS_RECORDS_MIN": 1},
    "log.compaction": {"_STRETCH_BYTES": 1},
    "log.compaction_map": {"_GATHER_BYTES": 1},
    "log.compaction_rewrite": {"_WRITE_BYTES": 1},
    "log.compression": {"_READ_BYTES": 3},
    "log.decoding": {"PART_BYTES_MAX": 1},
    "log.encoding": {"ROWS_BY_HAND_MAX": 1},
    "log.murmur2": {"_LONG_KEY_BYTES": 1},
    "log.repair": {"_COPY_BYTES": 3},
    "log.segment": {"_ROOM_BYTES_MIN": 1},
    "views.store": {"_SLICE_ROWS": 2},
    "views.topics": {"_ROWS_AT_A_TIME": 2},
}


def apply(patch: pytest.MonkeyPatch) -> None:
    """Lower every size at which the code takes another way."""
    for module_name, constants in LOWERED.items():
        module = importlib.import_module(f"millstream.{module_name}")
        for name, value in constants.items():
            lower(patch, module, name, value)


def lower(patch: pytest.MonkeyPatch, module: ModuleType, name: str, value: float) -> None:
    """Lower a constant where it stands, and where it has been imported to."""
    before = getattr(module, name)
    assert value < before, f"{module.__name__}.{name} is {before} already"
    holders = [found for key, found in sys.modules.items() if key.startswith("millstream.")]
    for holder in holders:
        if getattr(holder, name, None) is before:
            patch.setattr(holder, name, value)
