"""Maintenance of the broker: aborts transactions at their timeout, deletes the offsets of unused groups.

Segments, retention and compaction are the log's: `log/maintenance.py`.
"""

from __future__ import annotations

import asyncio
import logging

from millstream.access.tls import Certificate
from millstream.broker.node import BrokerNode
from millstream.errors import MillstreamError, RetriableError, SyncFailedError
from millstream.log.groups import expire_groups
from millstream.log.retention import BoundedClock

TIMEOUTS_EVERY_S = 1.0  # a client's transaction timeout is a matter of seconds
OFFSETS_EVERY_S = 60.0
_log = logging.getLogger(__name__)


async def run_maintenance(node: BrokerNode) -> None:
    """Abort transactions at their timeout, and delete the offsets of unused groups."""
    offsets_due_s = node.loop.time()
    # Offsets are deleted by the wall clock, so it counts only as far as time has passed.
    clock = BoundedClock(node.log.clock_ms(), _running_ms(node))
    while True:
        node.log_limiter.log_suppressed()
        try:
            await node.log.run_write(node.log.writer.transactions.expire)
            if node.loop.time() >= offsets_due_s:
                offsets_due_s = node.loop.time() + OFFSETS_EVERY_S
                await _expire_groups(node, clock.read(node.log.clock_ms(), _running_ms(node)))
                node.shares.sweep(node.share_groups.names())
        except RetriableError as error:
            _log.warning("maintenance will be retried: %s", error)
        except Exception as error:  # noqa: BLE001 - the next round may do better
            if isinstance(error, MillstreamError) and node.log.writer.failure is not None:
                if not isinstance(error, SyncFailedError):  # the node has reported that one
                    node.fail(error)
                return  # the log accepts no more appends: the broker ends, and says why
            # Whatever it is, transactions must still be aborted at their timeout: try again.
            node.log_limiter.log_closed(f"maintenance failed: {error}")
            _log.exception("maintenance failed, and will be retried")
        await asyncio.sleep(TIMEOUTS_EVERY_S)


async def refresh_certificate(node: BrokerNode, certificate: Certificate) -> None:
    """Use a renewed certificate, soon after its files were replaced."""
    while True:
        await asyncio.sleep(node.settings.certificate_every_s)
        # Not in a thread: a handshake meanwhile would use one certificate with another's key.
        try:
            certificate.refresh()
        except Exception:  # noqa: BLE001 - it is retried
            _log.exception("the certificate was not renewed; this will be retried")


def _running_ms(node: BrokerNode) -> int:
    return int(node.loop.time() * 1000)


async def _expire_groups(node: BrokerNode, now_ms: int) -> None:
    retention_ms = node.settings.offsets_retention_ms
    if retention_ms is None:
        return
    in_use, before_ms = node.groups.names(), now_ms - retention_ms
    deleted = await node.log.run_write(
        lambda: expire_groups(node.log.writer.control, before_ms, keep=in_use)
    )
    if deleted:
        _log.info("deleted the offsets of groups that were not used: %s", ", ".join(deleted))
