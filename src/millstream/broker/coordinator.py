"""The groups that have members, and who may speak in their name."""

from __future__ import annotations

from millstream.broker.codes import Code, Refused
from millstream.broker.members import Identity
from millstream.broker.membership import Group
from millstream.broker.memory import MemberMemory
from millstream.broker.settings import Settings
from millstream.errors import ConfigError
from millstream.log.groups import check_offsets


class Groups:
    """The groups that have members. Lives in the event loop."""

    def __init__(self, settings: Settings, memory: MemberMemory) -> None:
        self._settings = settings
        self._memory = memory
        self._groups: dict[str, Group] = {}

    def get(self, name: str) -> Group | None:
        """Return a group that has members."""
        return self._groups.get(name)

    def names(self) -> list[str]:
        """Return the groups that have members."""
        return list(self._groups)

    def make(self, name: str) -> Group:
        """Return a group; it is made if it is not there."""
        if name not in self._groups:
            self._groups[name] = Group(
                name,
                rebalance_delay_ms=self._settings.rebalance_delay_ms,
                memory=self._memory,
                on_empty=self._forget,
            )
        return self._groups[name]

    def _forget(self, group: Group) -> None:
        if self._groups.get(group.name) is group:
            del self._groups[group.name]

    def of_member(self, name: str) -> Group:
        """Return the group that a member speaks to.

        Raises:
            Refused: it has no members.
        """
        check_name(name)
        found = self._groups.get(name)
        if found is None:
            raise Refused(Code.UNKNOWN_MEMBER_ID, f"group {name!r} has no members; join it")
        return found

    def check_commit(self, name: str, who: Identity, generation: int) -> None:
        """Refuse offsets that a stale member commits.

        Raises:
            Refused: whoever commits is not in the group, or not in its generation.
        """
        check_name(name)
        group = self._groups.get(name)
        if group is None or group.state == "Empty":
            if generation >= 0:
                raise Refused(Code.ILLEGAL_GENERATION, f"group {name!r} has no members; join it")
            return
        if generation < 0 and not who.member_id and who.instance_id is None:
            raise Refused(Code.UNKNOWN_MEMBER_ID, f"group {name!r} has members: only they commit")
        member = group.member(who)
        group.check_generation(generation)
        if group.state == "CompletingRebalance":
            raise Refused(Code.REBALANCE_IN_PROGRESS, "a generation begins; sync first")
        group.touch(member)

    def close(self) -> None:
        """Answer all who wait."""
        for group in self._groups.values():
            group.close()


def check_name(name: str) -> None:
    """Refuse what cannot be the name of a group."""
    try:
        check_offsets(name, {})
    except ConfigError as error:
        raise Refused(Code.INVALID_GROUP_ID, str(error)) from error
