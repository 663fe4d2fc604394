"""Millions of malformed frames for the broker to decode and handle, in this process or over sockets.

    PYTHONPATH=src:tests python -m broker.fuzz --seed 1 --frames 5000000 --batches 1000000 --handled 100000
    PYTHONPATH=src:tests python -m broker.fuzz --seed 1 --sockets 60

A frame is read, or refused by an error that says so; what was read is answered, with a response that can
be read; a batch that is taken can be read from then on by everybody. Anything else is a finding: it is
told with its seed and number, and as hex for ``tests/broker/found_frames.txt``.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from broker.broker_process import AsProcess
from broker.fuzz_inputs import Frames, stream
from broker.raw_client import RawClient, batch, fetch, fetched, produce, produced

from millstream.broker.call import Call
from millstream.broker.dispatch import (
    Peer,
    UnauthenticatedError,
    UnknownRequestError,
    decode_call,
    handle_request,
)
from millstream.broker.node import BrokerNode
from millstream.broker.protocol import messages, messages_groups
from millstream.broker.protocol.error_codes import ApiError, ErrorCode
from millstream.broker.protocol.wire import ByteReader, MalformedError
from millstream.broker.records.batch_validation import BatchLimits, validate_batch
from millstream.broker.settings import BrokerSettings
from millstream.log.batch import read_header
from millstream.log.decoding import ALL_COLUMNS, Block, decode
from millstream.log.writer import LogWriter

PEER = Peer("127.0.0.1", 9092, "127.0.0.1")
RESPONSE_S = 20.0
LIMITS = BatchLimits(
    1 << 20, BrokerSettings().batch_plain_bytes_max, BrokerSettings().batch_records_max
)
_TOGETHER = 64  # requests that are handled at the same time
# What may wait for other members, or for records, by right.
_WAIT_BY_RIGHT = (messages_groups.JOIN_GROUP, messages_groups.SYNC_GROUP, messages.FETCH)
_LONGEST_MS = 50


@dataclass
class Outcome:
    """What became of frames."""

    counts: Counter[str] = field(default_factory=Counter)
    found: list[str] = field(default_factory=list)

    def find(self, what: str, number: int, data: bytes) -> None:
        self.found.append(f"{what}, number {number}: {data.hex()}")


def read(frame: bytes) -> Call | str:
    """Return the request in a frame, or how it is refused."""
    try:
        return decode_call(frame, PEER)
    except (MalformedError, UnknownRequestError, UnauthenticatedError) as error:
        return type(error).__name__


def take(data: bytes) -> str:
    """Return whether a batch is taken or how it is refused; what is taken can be read.

    Raises:
        AssertionError: it cannot.
    """
    try:
        taken = validate_batch(data, LIMITS)
    except ApiError as refused:
        return ErrorCode(refused.code).name
    written = taken.prefix(0, 0) + taken.tail
    header = read_header(written, 0)
    found = decode(Block(written, [(0, header)], "fuzz", 0), 0, taken.count, ALL_COLUMNS)
    assert found.num_rows == header.record_count == taken.count
    return "taken"


def read_frames(frames: Frames, numbers: range, outcome: Outcome) -> None:
    for number in numbers:
        frame = frames.frame(number)
        try:
            found = read(frame)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is a finding
            outcome.find(f"reading: {error!r}", number, frame)
            continue
        outcome.counts[found if isinstance(found, str) else "read"] += 1


def take_batches(frames: Frames, numbers: range, outcome: Outcome) -> None:
    for number in numbers:
        data = frames.batch(number)
        try:
            outcome.counts[take(data)] += 1
        except Exception as error:  # noqa: BLE001 - as above
            outcome.find(f"a batch: {error!r}", number, data)


async def handle_frames(frames: Frames, numbers: range, outcome: Outcome, folder: Path) -> None:
    """Answer what can be read, many at a time, on a log of its own."""
    with LogWriter(folder) as writer:
        writer.create_topic("t", partitions=2)
        writer.create_topic("u")
        writer.create_topic("compact", settings={"cleanup.policy": "compact"})
        node = BrokerNode(writer, BrokerSettings(rebalance_delay_ms=0), on_failure=_fail)
        node.start()
        try:
            for start in range(numbers.start, numbers.stop, _TOGETHER):
                these = range(start, min(start + _TOGETHER, numbers.stop))
                await asyncio.gather(*(_handle(node, frames, one, outcome) for one in these))
        finally:
            node.groups.close()
            await asyncio.to_thread(node.close)


def _fail(error: Exception) -> None:
    raise AssertionError(error)


async def _handle(node: BrokerNode, frames: Frames, number: int, outcome: Outcome) -> None:
    frame = frames.frame(number)
    call = read(frame)
    if isinstance(call, str) or _is_too_much(call):
        return
    try:
        try:
            async with asyncio.timeout(0.2 if call.api in _WAIT_BY_RIGHT else RESPONSE_S):
                data = await handle_request(node, call)
        finally:
            node.responses.release(call.held_bytes)
        if data is not None:
            flexible = call.api.flexible(call.version) and call.api is not messages.API_VERSIONS
            version = call.version if call.api.supports(call.version) else 0
            call.api.decode_response(ByteReader(b"".join(data), 8 + flexible), version)
        outcome.counts[f"handled {call.api.name}"] += 1
    except TimeoutError:
        if call.api not in _WAIT_BY_RIGHT:
            outcome.find(f"no response to {call.api.name} in {RESPONSE_S} s", number, frame)
    except Exception as error:  # noqa: BLE001 - as above
        outcome.find(f"handling {call.api.name}: {error!r}", number, frame)


def _is_too_much(call: Call) -> bool:
    """Return whether a request asks for more than this machine is to give: thousands of partitions."""
    request = call.request
    topics = request.get("topics") or ()
    return any(
        isinstance(one, dict) and max(one.get("num_partitions", 0), one.get("count", 0)) > 100
        for one in topics
    )


# -- by sockets -------------------------------------------------------------------------------


def by_sockets(frames: Frames, seconds: float, folder: Path, outcome: Outcome) -> None:
    """Send malformed streams to a broker that is a process, and between them be a client as it should be."""
    with AsProcess(folder / "data") as broker, RawClient(broker.address) as good:
        good.request("CreateTopics", 4, {"topics": [_topic("t", 2), _topic("well", 1)]})
        end_s, number, rounds = time.monotonic() + seconds, 0, 0
        slowest_s = 0.0
        while time.monotonic() < end_s:
            number += _send(broker.address, frames, number, outcome)
            began_s = time.monotonic()
            request = produce(batch(b"%d" % rounds), topic="well")
            done = produced(good.request("Produce", 7, request))
            assert (done["error_code"], done["base_offset"]) == (0, rounds), done
            found = fetched(good.request("Fetch", 11, fetch(rounds, topic="well")))
            assert found["high_watermark"] == rounds + 1, found
            slowest_s = max(slowest_s, time.monotonic() - began_s)
            rounds += 1
            assert broker.process.poll() is None, "the broker ended"
        outcome.counts["frames sent"] = number
        outcome.counts["rounds of the good client"] = rounds
        outcome.counts["slowest of them, ms"] = int(1000 * slowest_s)
        status = Path(f"/proc/{broker.process.pid}/status").read_text()
        (peak,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
        outcome.counts["peak memory of the broker, MiB"] = int(peak.split()[1]) >> 10
        code, _, err = broker.stop()
        outcome.counts["lines in the broker's log"] = len(err.splitlines())
        if code != 0 or "Traceback" in err:
            outcome.found.append(f"the broker ended with {code}: {err[-3000:]}")


def _topic(name: str, partitions: int) -> dict[str, object]:
    return {"name": name, "num_partitions": partitions, "replication_factor": 1}


def _send(address: str, frames: Frames, first: int, outcome: Outcome) -> int:
    count = 50
    with RawClient(address) as client:
        client.socket.settimeout(10)
        try:
            for piece in stream(frames, first, count):
                client.socket.sendall(piece)
                client.socket.setblocking(False)
                with suppress(BlockingIOError):
                    client.socket.recv(1 << 20)
                client.socket.settimeout(10)
        except ConnectionError:
            outcome.counts["connections closed by the broker"] += 1
        except TimeoutError:
            outcome.counts["connections that stood"] += 1
    return count


# -- the program ------------------------------------------------------------------------------


def rss_mib() -> float:
    """Return how much memory this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


def _measured(name: str, count: int, work: Callable[[range], None]) -> None:
    """Do a tenth to warm up, then the rest; print speed and memory."""
    if not count:
        return
    work(range(count // 10))
    gc.collect()
    before, began_s, cpu_s = rss_mib(), time.monotonic(), time.process_time()
    work(range(count // 10, count))
    took_s, cpu_s = time.monotonic() - began_s, time.process_time() - cpu_s
    gc.collect()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    done = count - count // 10
    print(
        f"{name}: {count:,}; {done / took_s:,.0f}/s, {done / cpu_s:,.0f} per CPU second; "
        f"memory after a tenth {before:.0f} MiB, at the end {rss_mib():.0f}, peak {peak}",
        flush=True,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--frames", type=int, default=0)
    parser.add_argument("--batches", type=int, default=0)
    parser.add_argument("--handled", type=int, default=0)
    parser.add_argument("--sockets", type=float, default=0, help="seconds")
    options = parser.parse_args()
    frames, outcome = Frames(options.seed), Outcome()
    with tempfile.TemporaryDirectory(prefix="millstream-fuzz-") as name:
        folder = Path(name)
        _measured("frames read", options.frames, lambda some: read_frames(frames, some, outcome))
        _measured("batches", options.batches, lambda some: take_batches(frames, some, outcome))

        def handle(some: range) -> None:
            asyncio.run(handle_frames(frames, some, outcome, folder / f"log-{some.start}"))

        _measured("frames handled", options.handled, handle)
        if options.sockets:
            by_sockets(frames, options.sockets, folder, outcome)
    for what, count in sorted(outcome.counts.items()):
        print(f"  {what}: {count:,}")
    kinds = Counter(one.partition(", number")[0] for one in outcome.found)
    for kind, count in kinds.most_common():
        print(f"FOUND {count} times: {kind}")
    for one in outcome.found[:20]:
        print(one[:4000])
    return 1 if outcome.found else 0


if __name__ == "__main__":
    sys.exit(main())
