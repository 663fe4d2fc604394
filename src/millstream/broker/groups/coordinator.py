"""The consumer groups that have members, and which requests they accept."""

from __future__ import annotations

from millstream.broker.groups.group import Group
from millstream.broker.groups.member import Identity
from millstream.broker.memory import MemberMemory
from millstream.broker.protocol.error_codes import ApiError, ErrorCode
from millstream.broker.settings import BrokerSettings
from millstream.errors import ConfigError
from millstream.log.groups import check_offsets


class GroupCoordinator:
    """The consumer groups that have members. Lives in the event loop."""

    def __init__(self, settings: BrokerSettings, memory: MemberMemory) -> None:
        self._settings = settings
        self._memory = memory
        self._groups: dict[str, Group] = {}

    def get(self, name: str) -> Group | None:
        """Return a group that has members."""
        return self._groups.get(name)

    def names(self) -> list[str]:
        """Return the groups that have members."""
        return list(self._groups)

    def get_or_create(self, name: str) -> Group:
        """Return a group; a missing one is created."""
        if name not in self._groups:
            self._groups[name] = Group(
                name,
                rebalance_delay_ms=self._settings.rebalance_delay_ms,
                memory=self._memory,
                on_empty=self._remove,
            )
        return self._groups[name]

    def _remove(self, group: Group) -> None:
        if self._groups.get(group.name) is group:
            del self._groups[group.name]

    def get_for_member(self, name: str) -> Group:
        """Return the group of a member's request.

        Raises:
            ApiError: it has no members.
        """
        check_group_id(name)
        found = self._groups.get(name)
        if found is None:
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID, f"group {name!r} has no members; join it")
        return found

    def check_commit(self, name: str, who: Identity, generation: int) -> None:
        """Reject offsets that a stale member commits.

        Raises:
            ApiError: the sender is not in the group, or not in its generation.
        """
        check_group_id(name)
        group = self._groups.get(name)
        if group is None or group.state == "Empty":
            if generation >= 0:
                raise ApiError(
                    ErrorCode.ILLEGAL_GENERATION, f"group {name!r} has no members; join it"
                )
            return
        if generation < 0 and not who.member_id and who.instance_id is None:
            raise ApiError(
                ErrorCode.UNKNOWN_MEMBER_ID, f"group {name!r} has members: only they commit"
            )
        member = group.member(who)
        group.check_generation(generation)
        if group.state == "CompletingRebalance":
            raise ApiError(ErrorCode.REBALANCE_IN_PROGRESS, "a generation begins; sync first")
        group.touch(member)

    def close(self) -> None:
        """Respond to all waiting members."""
        for group in self._groups.values():
            group.close()


def check_group_id(name: str) -> None:
    """Reject an invalid group name."""
    try:
        check_offsets(name, {})
    except ConfigError as error:
        raise ApiError(ErrorCode.INVALID_GROUP_ID, str(error)) from error
