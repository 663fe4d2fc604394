"""A member of a share group that sends exactly the requests of a test."""

from __future__ import annotations

import time
from collections.abc import Callable

from broker.raw_client import RawClient, batch, create, produce

from millstream.broker.protocol.wire import Message

ACCEPT, RELEASE, REJECT, RENEW = 1, 2, 3, 4
GROUP = 32


class Member(RawClient):
    """A member of a share group, on a connection of its own."""

    def __init__(self, address: str, name: str = "ann", *, group: str = "g") -> None:
        super().__init__(address)
        self.name, self.group, self.epoch = name, group, 0
        topics = self.request("Metadata", 12, {"topics": [{"topic_id": bytes(16), "name": "t"}]})
        self.topic_id = topics["topics"][0]["topic_id"]

    def fetch(
        self, *acknowledgements: tuple[int, int, int], partition: int = 0, **options: object
    ) -> Message:
        """Acknowledge [first, end), fetch, and return the response for the partition."""
        self.send("ShareFetch", 2, self.fetching(*acknowledgements, partition=partition, **options))
        return self.response()

    def fetching(
        self, *acknowledgements: tuple[int, int, int], partition: int = 0, **options: object
    ) -> Message:
        request = {
            "group_id": self.group,
            "member_id": self.name,
            "share_session_epoch": self.epoch,
            "max_wait_ms": 0,
            "min_bytes": 1,
            "max_records": 500,
            "share_acquire_mode": 1,
            "topics": self.topics(acknowledgements, partition),
            **options,
        }
        self.epoch = request["share_session_epoch"] + 1
        return request

    def topics(
        self, acknowledgements: tuple[tuple[int, int, int], ...], partition: int = 0
    ) -> list[Message]:
        batches = [
            {"first_offset": first, "last_offset": end - 1, "acknowledge_types": [kind]}
            for first, end, kind in acknowledgements
        ]
        one = {"partition_index": partition, "acknowledgement_batches": batches}
        return [{"topic_id": self.topic_id, "partitions": [one]}]

    def response(self) -> Message:
        response = self.receive()
        if response["error_code"]:
            return {"error": response["error_code"]}
        parts = [one for topic in response["responses"] for one in topic["partitions"]]
        return parts[0] if parts else {"acquired_records": [], "records": b"", "error_code": 0}

    def acquire(
        self, *acknowledgements: tuple[int, int, int], **options: object
    ) -> list[tuple[int, int, int]]:
        """Fetch, and return the acquired ranges: first offset, end, delivery count."""
        return acquired(self.fetch(*acknowledgements, **options))

    def acknowledge(self, *acknowledgements: tuple[int, int, int], **options: object) -> int:
        request = {
            "group_id": self.group,
            "member_id": self.name,
            "share_session_epoch": self.epoch,
            "topics": self.topics(acknowledgements),
            **options,
        }
        self.epoch += 1
        response = self.request("ShareAcknowledge", 2, request)
        return response["error_code"] or response["responses"][0]["partitions"][0]["error_code"]


def acquired(response: Message) -> list[tuple[int, int, int]]:
    assert not response.get("error_code"), response
    return [
        (one["first_offset"], one["last_offset"] + 1, one["delivery_count"])
        for one in response["acquired_records"]
    ]


def prepare(address: str, *values: bytes, group: str = "g", **settings: object) -> None:
    """Create the topic, fill it, and configure the group."""
    with RawClient(address) as client:
        client.request("CreateTopics", 4, create())
        if values:
            client.request("Produce", 7, produce(batch(*values)))
    configure(address, group, share_auto_offset_reset="earliest", **settings)


def configure(address: str, group: str = "g", **settings: object) -> int:
    configs = [
        {"name": name.replace("_", "."), "config_operation": 0, "value": str(value)}
        for name, value in settings.items()
    ]
    resource = {"resource_type": GROUP, "resource_name": group, "configs": configs}
    with RawClient(address) as client:
        (one,) = client.request("IncrementalAlterConfigs", 1, {"resources": [resource]})[
            "responses"
        ]
    return one["error_code"]


def start_and_lag(address: str, group: str = "g") -> tuple[int, int]:
    """Return start offset and lag."""
    with RawClient(address) as client:
        request = {"groups": [{"group_id": group, "topics": None}]}
        (response,) = client.request("DescribeShareGroupOffsets", 1, request)["groups"]
    one = response["topics"][0]["partitions"][0]
    return one["start_offset"], one["lag"]


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
