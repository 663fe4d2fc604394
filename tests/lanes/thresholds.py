"""The lane of lowered thresholds: what is done once there is much, is done for next to nothing.

Every size at which the code takes another way, without its answer changing, stands here with the least
value at which it still works. What limits what may be asked for (a record's size, a number of members)
and what paces waiting is no such size. A constant that is no longer there fails the run.
"""

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import FunctionType, ModuleType

import pytest

LOWERED: dict[str, dict[str, float]] = {
    "broker.connection": {
        "READ_AHEAD_BYTES": 1,
        "_CHUNK_BYTES": 3,
        "_PRODUCES_MAX": 1,
        "_REQUESTS_MAX": 1,
        "_TLS_CHUNK_BYTES": 3,
    },
    "broker.share.dead_letters": {"_BATCH_BYTES": 1, "_READ_BYTES": 1},
    "broker.dispatch": {"_CHUNK_BYTES_MIN": 1},
    "broker.memory": {"RESPONSE_BYTES_MIN": 1, "SMALL_BYTES_MAX": 8},
    "broker.requests.share_fetch": {"_READ_BYTES": 1},
    "capture.mysql.cells": {"BLOCK_ROWS_MIN": 1, "_BLOCK_ROWS_MAX": 1, "_RUN_BYTES_MAX": 1},
    "capture.mysql.decoder": {"_DESCRIBED_MAX": 1},
    "capture.mysql.snapshot": {"_BLOCK_ROWS_MAX": 1},
    "capture.mysql.snapshot_rows": {"_BLOCK_BYTES_MAX": 64, "_BLOCK_ROWS_MIN": 1},
    "capture.postgres.snapshot": {"_LINES_BYTES_MAX": 1, "_ROWS": 1},
    "capture.postgres.source": {"_RUN_BYTES_MAX": 1, "_RUN_ROWS_MAX": 2},
    "capture.postgres.stream": {"_BATCH_BYTES": 1},
    "capture.postgres.tracker": {"BLOCK_ROWS_MIN": 1},
    "capture.sqlite.cells": {"BLOCK_ROWS_MIN": 1},
    "capture.sqlite.source": {"_RUN_ROWS_MAX": 1},
    "capture.json_columns": {"_SMALL_END": 2},
    "capture.record_queues": {
        "COLUMNS_MIN": 1,
        "_QUEUED_BYTES_MAX": 1,
        "_QUEUED_MAX": 1,
        "_WAITING_MAX": 1,
    },
    "client.folder.buffer": {"PRODUCER_BATCH_BYTES_MAX": 1},
    "client.folder.consumer": {"_FETCH_BYTES": 1},
    "client.kafka.groups": {"_CLIENTS_MAX": 1},
    "client.kafka.producer_pool": {"_KEPT_MAX": 1},
    "client.kafka.fetcher": {"_TAKEN_MAX": 1},
    "client.partitioner": {"BULK_RECORDS": 3, "_KEYS_KEPT_MAX": 2, "_KEY_BYTES_MAX": 1},
    "client.folder.spill": {"SEGMENT_BYTES": 1, "_READ_BYTES": 1},
    "edge.statsd.listener": {"_CHECK_EVERY": 1},
    "edge.http.routes": {"_IN_LOOP_BYTES": 1},
    "edge.http.event_streams": {"READ_BYTES": 1, "RECORDS_AT_ONCE": 1},
    "edge.webhooks.delivery": {"_IN_FLIGHT_BYTES_MAX": 1, "_UNFINISHED_MAX": 1},
    "ownership.writer": {"REQUEST_BYTES_MAX": 1},
    "kernels.aggregates.superaccumulator": {"_GATHERED": 1, "_LARGE": 1, "_PARTS_MAX": 1},
    "kernels.aggregates.exact_sum": {"_FITS": 2},
    "kernels.dedup.event_ids": {"_ROUNDS_MAX": 1},
    "kernels.dedup.bloom_generations": {"_MOVES": 1},
    "kernels.windows.count_windows": {"_SLOTS_PER_TIMEOUT": 1},
    "kernels.errors.dead_letters": {"_FAR_APART": 1},
    "kernels.decode.json_values": {
        "_BLOCK_BYTES": 64,
        "_BY_ROW_MAX": 1,
        "_PARTS": 2,
        "_STRETCH_MIN": 1,
    },
    "kernels.frames": {"_SPARE": 0, "_SPARE_BYTES": 1},
    "kernels.state.hash_order": {"_WINDOWS_MAX": 1},
    "kernels.dedup.kept_ids": {"_SLOTS": 2, "_SLOT_US_MIN": 1},
    "kernels.state.timers": {"_SLOTS_PER_WAIT": 2, "_SLOT_US_MIN": 1},
    "kernels.dedup.signed_dedup": {"_SLOTS": 2, "_SLOT_US_MIN": 1},
    "kernels.final_rows": {"_SLOTS_PER_LATENESS": 1, "_SLOT_US_MIN": 1},
    "kernels.process.stored_keys": {"_MIGRATED_KEYS": 1},
    "kernels.sessions.batch": {"_SLOT_CLOCK_MS": 1},
    "kernels.sessions.config": {"_SLOTS_PER_GAP": 1},
    "kernels.windows.sliding_windows": {"_SLOTS_PER_SIZE": 1},
    "kernels.state.hash_search": {"COMPILED_HASHES_MIN": 1, "_SAMPLES": 1},
    "kernels.state.sorted_runs": {"PART_ROWS": 2},
    "kernels.state.appended_rows": {"_FAN_IN": 2, "_CHUNK_BYTES": 3000, "_SMALL_CHUNKS_MAX": 1},
    "kernels.windows.window_operator": {"SLOTS_OPEN_MAX": 1, "_APART": 0, "_SAMPLED_MIN": 1},
    "kernels.tables.group_sets": {"_ID_BITS": 1, "_VALUE_BITS": 1, "_SETS_MAX": 2, "_FEW": 1},
    "log.archive": {"ROWS_PER_GROUP": 2, "_GROUPS_PER_READ": 1},
    "log.batch": {"_COPIED_BYTES_MAX": 1},
    "log.batch_reader": {"_BLOCK_BYTES": 1, "_PLACES_MAX": 1, "_SEARCH_BYTES": 1},
    "log.boundaries": {"_GUESS_BYTES": 3, "_GUESS_RECORDS_MIN": 1, "_RUN_MIN": 1, "_STRAYS_MAX": 1},
    "log.compaction.cleaner": {"_INTERVAL_BYTES": 1},
    "log.compaction.offset_map": {"_GATHER_BYTES": 1},
    "log.compaction.rewrite": {"_WRITE_BYTES": 1},
    "log.compression": {"_BLOCK_BYTES": 64, "_READ_BYTES": 3},
    "log.decoding": {"DECODED_BYTES_MAX": 1, "_FEW_RECORDS": 1},
    "log.encoding": {"RECORDS_BY_HAND_MAX": 1},
    "log.markers": {"FILLER_OFFSETS_MAX": 3},
    "log.murmur2": {"_LONG_KEY_BYTES": 1},
    "log.reader": {"BLOCK_BYTES": 1, "_LOOKED_THROUGH_BYTES": 1},
    "log.repair.repair": {"_COPY_BYTES": 3},
    "log.segment": {"READ_BYTES": 1, "_INDEX_LAG_BYTES": 1, "_ROOM_BYTES_MIN": 61},
    "log.unread": {"BLOCKS_MAX": 2, "BLOCK_BYTES": 1},
    "engine.source.split_reader": {"CHUNK_BYTES": 1},
    "spark.frame_blocks": {
        "_NAMED_BYTES_MIN": 1,
        "_FETCHED_BYTES_MAX": 1,
        "_COLLECTED_BYTES_MAX": 1,
    },
    "engine.frame_files": {"_BYTES_MIN": 1},
    "engine.stages.run_files": {"OWN_FILE_BYTES_MIN": 1},
    "engine.source.planner": {
        "_DRIVER_BYTES_MAX": 1,
        "_DRIVER_ROWS_MAX": 1,
        "_TASK_ROWS_MIN": 1,
        "_YIELD_BYTES": 1,
    },
    "engine.stages.executor": {"DRIVER_BYTES_MAX": 1},
    "views.state_store.sqlite_upsert": {"_COMPARED_ROWS": 1, "_PART_ROWS": 2},
    "views.sinks.dataset_files": {"_BEGINNING_BYTES": 1, "_NAME_BYTES_MAX": 34},
    "views.dead_letters": {"SLICE_ROWS": 2},
    "views.postgres.view_table": {"_ENTRY_BYTES_MAX": 200},  # room for the beginnings of four texts
    "views.sinks.postgres": {"_SLICE_ROWS": 2},
    "views.server.event_streams": {"_CHANGES_AT_ONCE": 1},
    "views.state_store.store": {"_SLICE_ROWS": 2},
    "views.sinks.topic_records": {"_SLICE_ROWS": 2},
}
# ... and those that somewhere else refuse, or promise something: only in the module that divides by them.
LOWERED_HERE: dict[str, dict[str, float]] = {
    "log.encoding": {"BATCH_BYTES_MAX": 100},
}


def apply(patch: pytest.MonkeyPatch) -> None:
    """Lower every size at which the code takes another way."""
    for module_name, name, value in _all(LOWERED):
        module = importlib.import_module(f"millstream.{module_name}")
        lower(patch, module, name, value)
    for module_name, name, value in _all(LOWERED_HERE):
        module = importlib.import_module(f"millstream.{module_name}")
        patch.setattr(module, name, lowered(module, name, value))


def _all(sizes: dict[str, dict[str, float]]) -> list[tuple[str, str, float]]:
    return [(module, name, value) for module, of in sizes.items() for name, value in of.items()]


def lowered(module: ModuleType, name: str, value: float) -> float:
    """Return the value that a constant is given; one that it has already lowers nothing."""
    before = getattr(module, name)
    assert value < before, f"{module.__name__}.{name} is {before} already"
    return value


def lower(patch: pytest.MonkeyPatch, module: ModuleType, name: str, value: float) -> None:
    """Lower a constant where it stands, where it has been imported to, and where it is a default."""
    before = getattr(module, name)
    lowered(module, name, value)
    for function in _functions(module):
        defaults = function.__kwdefaults__ or {}
        for parameter in [key for key, given in defaults.items() if given is before]:
            patch.setitem(defaults, parameter, value)
    holders = [found for key, found in sys.modules.items() if key.startswith("millstream.")]
    for holder in holders:
        if getattr(holder, name, None) is before:
            patch.setattr(holder, name, value)


def _functions(module: ModuleType) -> Iterator[FunctionType]:
    """Yield the functions of a module, and those of its classes."""
    for scope in (module, *filter(inspect.isclass, vars(module).values())):
        if getattr(scope, "__module__", module.__name__) == module.__name__:
            yield from filter(inspect.isfunction, vars(scope).values())
