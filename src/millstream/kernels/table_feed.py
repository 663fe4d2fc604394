"""The rows of tables that are held, as a batch would give them out: for steps that are computed of them instead of the log."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import polars as pl

from millstream.kernels.errors.dead_letter_collector import DeadLetterCollector
from millstream.kernels.frames import FrameRow, encode_message
from millstream.kernels.given_out import HeldTable
from millstream.kernels.plan import OperatorPlan
from millstream.kernels.routing import TaskLedger, make_routers
from millstream.kernels.state.keyhash import Buckets
from millstream.kernels.state.operator_state import OperatorState
from millstream.kernels.state.sorted_runs import Run, RunStore
from millstream.kernels.time.watermarks import InputClock

Manifests = Mapping[tuple[int, int], bytes]
"""By stage and bucket."""


@dataclass(frozen=True)
class TableFeed:
    """The table of ``operator``, of which state is kept under the key ``stored``, in manifests of any program."""

    operator: OperatorPlan
    stored: str

    def times(self, manifests: Manifests) -> Iterator[FrameRow]:
        """Yield what the steps below know of the time: the table's, after its last batch."""
        for bucket, message in self._messages(manifests):
            ledger = TaskLedger()
            for port in self.operator.time_ports:
                yield ledger.time_message(port, bucket, encode_message(self._time(port, message)))
            yield ledger.report_row(bucket)

    def rows(
        self, manifests: Manifests, runs: RunStore, buckets: Buckets, rows_max: int
    ) -> Iterator[tuple[int, list[FrameRow]]]:
        """Yield all rows, in parts of about ``rows_max``: how many they are, and what goes to the steps below."""
        for bucket, message in self._messages(manifests):
            for rows in self._table.given_out(OperatorState.from_message(message, runs), rows_max):
                if rows.height:
                    yield rows.height, self._frames(rows, bucket, buckets)

    def count(self, manifests: Manifests) -> int:
        """Return how many rows its runs of state have: at least as many as hold."""
        family = self._table.rows_family
        messages = (message["runs"].get(family, ()) for _, message in self._messages(manifests))
        return sum(Run.from_message(entry).rows for entries in messages for entry in entries)

    @property
    def _table(self) -> HeldTable:
        kernel = self.operator.kernel
        assert isinstance(kernel, HeldTable), "only such steps are held tables"
        return kernel

    def _messages(self, manifests: Manifests) -> Iterator[tuple[int, dict[str, Any]]]:
        for (_, bucket), manifest in sorted(manifests.items()):
            message = json.loads(manifest).get(self.stored)
            if message is not None:
                yield bucket, message

    def _frames(self, rows: pl.DataFrame, bucket: int, buckets: Buckets) -> list[FrameRow]:
        ledger, dead_letters = TaskLedger(), DeadLetterCollector()
        ledger.count(self.operator.kernel.name, rows_out=rows.height)
        found: list[FrameRow] = []
        for route in make_routers(self.operator.edges, buckets, ledger, dead_letters):
            route.take(rows)
            found += route.frames(bucket)
        # Rows that fail are left out: their dead letters are there already, or would be those of a rebuild.
        return [*found, ledger.report_row(bucket)]

    def _time(self, port: int, message: Mapping[str, Any]) -> dict[str, Any]:
        clocks = [InputClock.from_message(one) for one in message["clocks"].values()]
        return {
            "to": port,
            "input": self.operator.kernel.name,
            "watermark": self.operator.kernel.output_watermark(message["watermark"]),
            "active": any(clock.active for clock in clocks),
            "advances": any(clock.advances for clock in clocks),
            "clock_ms": 0,
            "wall_ms": 0,
        }
