"""What the broker does from time to time, beside what the log does: end what is too slow, or unused."""

from __future__ import annotations

import asyncio
import logging

from millstream.broker.encryption import Certificate
from millstream.broker.node import Node
from millstream.errors import MillstreamError, RetriableError, SyncFailedError
from millstream.log.groups import forget_silent_groups
from millstream.log.retention import RunningClock

TIMEOUTS_EVERY_S = 1.0  # a client's transaction timeout is a matter of seconds
OFFSETS_EVERY_S = 60.0
_log = logging.getLogger(__name__)


async def keep_house(node: Node) -> None:
    """Abort transactions that are open for too long, and forget the offsets of unused groups."""
    offsets_due_s = node.loop.time()
    # Offsets are deleted by the wall clock, so it is believed only as far as time has passed.
    clock = RunningClock(node.clock_ms(), _running_ms(node))
    while True:
        node.closings.sum_up()
        try:
            await node.change(node.writer.transactions.expire)
            if node.loop.time() >= offsets_due_s:
                offsets_due_s = node.loop.time() + OFFSETS_EVERY_S
                await _forget_groups(node, clock.read(node.clock_ms(), _running_ms(node)))
                node.shares.sweep(node.share_groups.names())
        except RetriableError as error:
            _log.warning("housekeeping is tried again: %s", error)
        except Exception as error:  # noqa: BLE001 - the next round may do better
            if isinstance(error, MillstreamError) and node.writer.failure is not None:
                if not isinstance(error, SyncFailedError):  # of which the node has told
                    node.fail(error)
                return  # the log takes nothing any more: the broker ends, and says why
            # Whatever it is, transactions must go on being ended: the next round may do better.
            node.closings.tell(f"housekeeping failed: {error}")
            _log.exception("housekeeping failed, and is tried again")
        await asyncio.sleep(TIMEOUTS_EVERY_S)


async def keep_certificate(node: Node, certificate: Certificate) -> None:
    """Show a certificate that was renewed, from soon after its files were replaced."""
    while True:
        await asyncio.sleep(node.settings.certificate_every_s)
        # Not in a thread: a handshake meanwhile would be shown one certificate with another's key.
        try:
            certificate.refresh()
        except Exception:  # noqa: BLE001 - it is looked at again
            _log.exception("the certificate stays as it was; it is looked at again")


def _running_ms(node: Node) -> int:
    return int(node.loop.time() * 1000)


async def _forget_groups(node: Node, now_ms: int) -> None:
    retention_ms = node.settings.offsets_retention_ms
    if retention_ms is None:
        return
    in_use, before_ms = node.groups.names(), now_ms - retention_ms
    gone = await node.change(
        lambda: forget_silent_groups(node.writer.control, before_ms, keep=in_use)
    )
    if gone:
        _log.info("forgot the offsets of groups that were not used: %s", ", ".join(gone))
