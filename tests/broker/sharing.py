"""A member of a share group that says exactly what a test wants said."""

from __future__ import annotations

import time
from collections.abc import Callable

from broker.asking import Asking, batch, create, produce

from millstream.broker.wire import Message

ACCEPT, RELEASE, REJECT, RENEW = 1, 2, 3, 4
GROUP = 32


class Member(Asking):
    """A member of a share group, on a connection of its own."""

    def __init__(self, address: str, name: str = "ann", *, group: str = "g") -> None:
        super().__init__(address)
        self.name, self.group, self.turn = name, group, 0
        topics = self.ask("Metadata", 12, {"topics": [{"topic_id": bytes(16), "name": "t"}]})
        self.topic_id = topics["topics"][0]["topic_id"]

    def fetch(self, *said: tuple[int, int, int], partition: int = 0, **options: object) -> Message:
        """Say what became of [first, end), fetch, and return what the partition is answered."""
        self.say("ShareFetch", 2, self.fetching(*said, partition=partition, **options))
        return self.heard()

    def fetching(
        self, *said: tuple[int, int, int], partition: int = 0, **options: object
    ) -> Message:
        request = {
            "group_id": self.group,
            "member_id": self.name,
            "share_session_epoch": self.turn,
            "max_wait_ms": 0,
            "min_bytes": 1,
            "max_records": 500,
            "share_acquire_mode": 1,
            "topics": self.topics(said, partition),
            **options,
        }
        self.turn = request["share_session_epoch"] + 1
        return request

    def topics(self, said: tuple[tuple[int, int, int], ...], partition: int = 0) -> list[Message]:
        batches = [
            {"first_offset": first, "last_offset": end - 1, "acknowledge_types": [kind]}
            for first, end, kind in said
        ]
        one = {"partition_index": partition, "acknowledgement_batches": batches}
        return [{"topic_id": self.topic_id, "partitions": [one]}]

    def heard(self) -> Message:
        answer = self.hear()
        if answer["error_code"]:
            return {"error": answer["error_code"]}
        parts = [one for topic in answer["responses"] for one in topic["partitions"]]
        return parts[0] if parts else {"acquired_records": [], "records": b"", "error_code": 0}

    def given(self, *said: tuple[int, int, int], **options: object) -> list[tuple[int, int, int]]:
        """Return what it is given: first offset, end, deliveries."""
        return given(self.fetch(*said, **options))

    def acknowledge(self, *said: tuple[int, int, int], **options: object) -> int:
        request = {
            "group_id": self.group,
            "member_id": self.name,
            "share_session_epoch": self.turn,
            "topics": self.topics(said),
            **options,
        }
        self.turn += 1
        answer = self.ask("ShareAcknowledge", 2, request)
        return answer["error_code"] or answer["responses"][0]["partitions"][0]["error_code"]


def given(answer: Message) -> list[tuple[int, int, int]]:
    assert not answer.get("error_code"), answer
    return [
        (one["first_offset"], one["last_offset"] + 1, one["delivery_count"])
        for one in answer["acquired_records"]
    ]


def prepare(address: str, *values: bytes, group: str = "g", **settings: object) -> None:
    """Make the topic, fill it, and say how the group is to be."""
    with Asking(address) as client:
        client.ask("CreateTopics", 4, create())
        if values:
            client.ask("Produce", 7, produce(batch(*values)))
    configure(address, group, share_auto_offset_reset="earliest", **settings)


def configure(address: str, group: str = "g", **settings: object) -> int:
    configs = [
        {"name": name.replace("_", "."), "config_operation": 0, "value": str(value)}
        for name, value in settings.items()
    ]
    resource = {"resource_type": GROUP, "resource_name": group, "configs": configs}
    with Asking(address) as client:
        (one,) = client.ask("IncrementalAlterConfigs", 1, {"resources": [resource]})["responses"]
    return one["error_code"]


def where(address: str, group: str = "g") -> tuple[int, int]:
    """Return start offset and lag."""
    with Asking(address) as client:
        asked = {"groups": [{"group_id": group, "topics": None}]}
        (answer,) = client.ask("DescribeShareGroupOffsets", 1, asked)["groups"]
    one = answer["topics"][0]["partitions"][0]
    return one["start_offset"], one["lag"]


def until(holds: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
