"""Groups by the clock of a loop that never waits: who is in, who is out, and who may speak."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.group import Group
from millstream.broker.groups.member import Identity, JoinRequest, JoinResult, MemberIdRequiredError
from millstream.broker.memory import MEMBER_BYTES, MemberMemory
from millstream.broker.protocol.error_codes import ApiError, ErrorCode
from millstream.broker.settings import BrokerSettings

SESSION_MS, REBALANCE_MS, DELAY_MS = 10_000, 30_000, 100


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its time goes on when there is nothing else to do."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 1000.0
        look = self._selector.select

        def select(timeout_s: float | None) -> Any:
            assert timeout_s is not None, "everybody waits, and for nothing"
            self._now_s += timeout_s
            return look(0)

        self._selector.select = select

    def time(self) -> float:
        return self._now_s


def by_virtual_time(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    def run() -> None:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(test())

    run.__name__ = test.__name__
    return run


def joining(member_id: str = "", *, instance: str | None = None, **given: Any) -> JoinRequest:
    return JoinRequest(
        Identity(member_id, instance),
        "client",
        "host",
        **{
            "session_timeout_ms": SESSION_MS,
            "rebalance_timeout_ms": REBALANCE_MS,
            "protocol_type": "consumer",
            "protocols": {"range": b"topics"},
            **given,
        },
    )


def fresh(*, bytes_max: int = 1 << 20, members_max: int = 100) -> tuple[Group, list[Group]]:
    emptied: list[Group] = []
    memory = MemberMemory(bytes_max, members_max)
    return Group("g", rebalance_delay_ms=DELAY_MS, memory=memory, on_empty=emptied.append), emptied


async def settle(group: Group, *members: JoinRequest) -> list[JoinResult]:
    """Let members join, and the leader assign to each its own id."""
    joins = [asyncio.ensure_future(group.join(one)) for one in members]
    joined = await asyncio.gather(*joins)
    everybody = {one.member_id: one.member_id.encode() for one in joined}
    syncs = [
        group.sync(
            Identity(one.member_id, said.who.instance_id),
            one.generation,
            everybody if one.member_id == one.leader else {},
        )
        for one, said in zip(joined, members, strict=True)
    ]
    assert await asyncio.gather(*syncs) == list(everybody.values())
    return joined


async def refused(code: ErrorCode, attempt: Coroutine[Any, Any, object]) -> None:
    with pytest.raises(ApiError) as caught:
        await attempt
    assert caught.value.code == code


def beat(group: Group, joined: JoinResult, instance: str | None = None) -> ErrorCode:
    try:
        group.heartbeat(Identity(joined.member_id, instance), joined.generation)
    except ApiError as error:
        return error.code
    return ErrorCode.NONE


async def alive(group: Group, joined: JoinResult, seconds: float) -> list[ErrorCode]:
    """Say every second that a member is alive."""
    codes = []
    for _ in range(int(seconds)):
        await asyncio.sleep(1)
        codes.append(beat(group, joined))
    return codes


@by_virtual_time
async def test_those_who_come_together_share_the_first_generation() -> None:
    group, _ = fresh()
    joined = await settle(group, *(joining() for _ in range(3)))
    assert {one.generation for one in joined} == {1}
    (leader,) = {one.leader for one in joined}
    told = [one for one in joined if one.members]
    assert [one.member_id for one in told] == [leader]
    assert {who.member_id for who, _ in told[0].members} == {one.member_id for one in joined}
    assert group.state == "Stable"
    assert [beat(group, one) for one in joined] == [ErrorCode.NONE] * 3


@by_virtual_time
async def test_a_newcomer_makes_the_others_join_anew() -> None:
    group, _ = fresh()
    (first,) = await settle(group, joining())
    second = asyncio.ensure_future(group.join(joining()))
    await asyncio.sleep(0.5)
    assert group.state == "PreparingRebalance"
    assert beat(group, first) == ErrorCode.REBALANCE_IN_PROGRESS
    await refused(
        ErrorCode.REBALANCE_IN_PROGRESS, group.sync(Identity(first.member_id), first.generation, {})
    )
    again = await group.join(joining(first.member_id))
    newcomer = await second
    assert (again.generation, newcomer.generation) == (2, 2)
    assert again.leader == first.member_id  # who led goes on leading
    assert beat(group, first) == ErrorCode.ILLEGAL_GENERATION
    await refused(ErrorCode.ILLEGAL_GENERATION, group.sync(Identity(first.member_id), 1, {}))


@by_virtual_time
async def test_who_does_not_join_anew_in_time_is_put_out() -> None:
    group, _ = fresh()
    first, second = await settle(group, joining(), joining())
    begun_s = asyncio.get_running_loop().time()
    joins = asyncio.ensure_future(group.join(joining(first.member_id, protocols={"range": b"x"})))
    # It says all the time that it is alive, and yet it does not join.
    codes = await alive(group, second, REBALANCE_MS / 1000 + 1)
    joined = await joins
    assert asyncio.get_running_loop().time() - begun_s >= REBALANCE_MS / 1000
    assert [who.member_id for who, _ in joined.members] == [first.member_id]
    assert set(codes[:-2]) == {ErrorCode.REBALANCE_IN_PROGRESS}
    assert codes[-1] == ErrorCode.UNKNOWN_MEMBER_ID


@by_virtual_time
async def test_who_is_silent_is_put_out_and_the_rest_goes_on() -> None:
    group, _ = fresh()
    first, second = await settle(group, joining(), joining())
    codes = await alive(group, first, SESSION_MS / 1000 + 1)
    assert codes[: SESSION_MS // 1000 - 1] == [ErrorCode.NONE] * (SESSION_MS // 1000 - 1)
    assert codes[-1] == ErrorCode.REBALANCE_IN_PROGRESS
    again = await group.join(joining(first.member_id))
    assert [who.member_id for who, _ in again.members] == [first.member_id]
    assert beat(group, second) == ErrorCode.UNKNOWN_MEMBER_ID


@by_virtual_time
async def test_a_group_whose_members_all_fall_silent_is_empty() -> None:
    group, emptied = fresh()
    await settle(group, joining(), joining())
    await asyncio.sleep(SESSION_MS / 1000 + 1)
    assert (group.state, group.members, emptied) == ("Empty", {}, [group])


@by_virtual_time
async def test_who_fetches_no_assignment_in_time_is_put_out() -> None:
    group, _ = fresh()
    first, second = await asyncio.gather(group.join(joining()), group.join(joining()))
    leader, other = (first, second) if first.members else (second, first)
    await group.sync(Identity(leader.member_id), 1, {leader.member_id: b"all"})
    heard = asyncio.ensure_future(alive(group, leader, REBALANCE_MS / 1000 + 2))
    codes = await alive(group, other, REBALANCE_MS / 1000 + 2)
    assert (await heard)[-1] == ErrorCode.REBALANCE_IN_PROGRESS
    assert codes[-1] == ErrorCode.UNKNOWN_MEMBER_ID


@by_virtual_time
async def test_a_leader_that_dies_does_not_hold_the_others_up() -> None:
    group, _ = fresh()
    first, second = await asyncio.gather(group.join(joining()), group.join(joining()))
    leader, other = (first, second) if first.members else (second, first)
    # It is alive as long as it waits, however long that takes; the leader is not.
    await refused(
        ErrorCode.REBALANCE_IN_PROGRESS, group.sync(Identity(other.member_id), other.generation, {})
    )
    again = await group.join(joining(other.member_id))
    assert again.leader == other.member_id != leader.member_id


@by_virtual_time
async def test_who_leaves_is_gone_at_once() -> None:
    group, emptied = fresh()
    first, second = await settle(group, joining(), joining())
    group.leave(Identity(second.member_id))
    assert beat(group, first) == ErrorCode.REBALANCE_IN_PROGRESS
    with pytest.raises(ApiError, match="not in the group"):
        group.leave(Identity(second.member_id))
    assert emptied == []
    group.leave(Identity(first.member_id))
    assert emptied == [group]


@by_virtual_time
async def test_a_member_learns_its_id_first() -> None:
    group, emptied = fresh()
    with pytest.raises(MemberIdRequiredError) as caught:
        await group.join(joining(member_id_required=True))
    joined = await group.join(joining(caught.value.member_id))
    assert joined.member_id == caught.value.member_id
    with pytest.raises(MemberIdRequiredError) as caught:
        await group.join(joining(member_id_required=True))
    await asyncio.sleep(SESSION_MS / 1000 + 1)  # it never comes again, and the first is silent
    await refused(ErrorCode.UNKNOWN_MEMBER_ID, group.join(joining(caught.value.member_id)))
    assert emptied


@by_virtual_time
async def test_an_id_that_was_told_is_waited_for() -> None:
    group, _ = fresh()
    (first,) = await settle(group, joining())
    with pytest.raises(MemberIdRequiredError) as caught:
        await group.join(joining(member_id_required=True))
    rejoined = asyncio.ensure_future(group.join(joining(first.member_id)))
    await asyncio.sleep(1)
    assert not rejoined.done()
    second = await group.join(joining(caught.value.member_id))
    assert second.generation == (await rejoined).generation == 2


@by_virtual_time
async def test_protocols_that_have_nothing_in_common_are_refused() -> None:
    group, _ = fresh()
    await settle(group, joining(protocols={"range": b"", "sticky": b""}))
    for wrong in (
        joining(protocols={"other": b""}),
        joining(protocol_type="connect"),
        joining(protocols={}),
        joining(protocol_type=""),
    ):
        await refused(ErrorCode.INCONSISTENT_GROUP_PROTOCOL, group.join(wrong))
    assert group.state == "Stable"


@by_virtual_time
async def test_the_protocol_that_most_prefer_among_the_common_ones_is_taken() -> None:
    group, _ = fresh()
    offers = ({"a": b"", "b": b"", "c": b""}, {"c": b"", "b": b""}, {"a": b"", "c": b"", "b": b""})
    joined = await settle(group, *(joining(protocols=one) for one in offers))
    assert {one.protocol_name for one in joined} == {"c"}


@by_virtual_time
async def test_a_static_member_comes_back_without_a_rebalance_and_the_old_one_is_fenced() -> None:
    group, _ = fresh()
    one, two = await settle(group, joining(instance="a"), joining(instance="b"))
    follower, name = (one, "a") if one.member_id != one.leader else (two, "b")
    back = await group.join(joining(instance=name))
    assert (back.generation, group.state) == (1, "Stable")
    assert back.member_id != follower.member_id
    assert await group.sync(Identity(back.member_id, name), 1, {}) == follower.member_id.encode()
    assert beat(group, follower, name) == ErrorCode.FENCED_INSTANCE_ID
    assert beat(group, back, name) == ErrorCode.NONE


@pytest.mark.parametrize("skips", [True, False])
def test_a_static_leader_that_comes_back_assigns_nothing(skips: bool) -> None:
    async def story() -> None:
        group, _ = fresh()
        joined = await settle(group, joining(instance="a"), joining(instance="b"))
        leader = next(one for one in joined if one.members)
        name = "a" if leader is joined[0] else "b"
        back = await group.join(joining(instance=name, can_skip_assignment=skips))
        assert (back.generation, back.skip_assignment) == (1, skips)
        assert (back.leader == back.member_id) == skips
        assert bool(back.members) == skips

    by_virtual_time(story)()


@by_virtual_time
async def test_a_static_member_that_is_silent_goes_when_its_session_ends() -> None:
    group, _ = fresh()
    one, _two = await settle(group, joining(instance="a"), joining(instance="b"))
    codes = []
    for _ in range(SESSION_MS // 1000 + 1):
        await asyncio.sleep(1)
        codes.append(beat(group, one, "a"))
    assert codes[-1] == ErrorCode.REBALANCE_IN_PROGRESS
    assert set(codes[:-3]) == {ErrorCode.NONE}


@by_virtual_time
async def test_a_static_member_may_be_put_out_by_name() -> None:
    group, emptied = fresh()
    await settle(group, joining(instance="a"))
    with pytest.raises(ApiError) as caught:
        group.leave(Identity("another", "a"))
    assert caught.value.code == ErrorCode.FENCED_INSTANCE_ID
    group.leave(Identity("", "a"))
    assert emptied == [group]


@by_virtual_time
async def test_an_answer_that_was_lost_is_given_again() -> None:
    group, _ = fresh()
    first, second = await settle(group, joining(), joining())
    follower = first if not first.members else second
    again = await group.join(joining(follower.member_id))
    assert (again.generation, group.state) == (1, "Stable")
    mine = await group.sync(Identity(follower.member_id), 1, {})
    assert mine == follower.member_id.encode()


@by_virtual_time
async def test_a_client_that_went_while_it_waited_holds_nobody_up_for_ever() -> None:
    group, _ = fresh()
    (first,) = await settle(group, joining())
    gone = asyncio.ensure_future(group.join(joining()))
    await asyncio.sleep(0.1)
    gone.cancel()  # its connection ended
    again = await group.join(joining(first.member_id))
    assert len(again.members) == 2  # nobody could know yet
    await refused(
        ErrorCode.REBALANCE_IN_PROGRESS,
        _sync_and_wait(group, again),
    )
    final = await group.join(joining(first.member_id))
    assert [who.member_id for who, _ in final.members] == [first.member_id]


async def _sync_and_wait(group: Group, joined: JoinResult) -> None:
    await group.sync(Identity(joined.member_id), joined.generation, {joined.member_id: b"mine"})
    while True:
        await asyncio.sleep(1)
        group.heartbeat(Identity(joined.member_id), joined.generation)


@by_virtual_time
async def test_a_group_that_nobody_could_join_is_not_kept() -> None:
    groups = GroupCoordinator(BrokerSettings(), MemberMemory(1 << 20, 100))
    await refused(
        ErrorCode.INCONSISTENT_GROUP_PROTOCOL, groups.get_or_create("g").join(joining(protocols={}))
    )
    assert groups.names() == []
    with pytest.raises(MemberIdRequiredError):
        await groups.get_or_create("g").join(joining(member_id_required=True))
    assert groups.names() == ["g"]
    await asyncio.sleep(SESSION_MS / 1000 + 1)
    assert groups.names() == []


@by_virtual_time
async def test_only_members_of_the_generation_commit() -> None:
    groups = GroupCoordinator(BrokerSettings(), MemberMemory(1 << 20, 100))
    nobody = Identity("")

    def commit(who: Identity, generation: int) -> ErrorCode:
        try:
            groups.check_commit("g", who, generation)
        except ApiError as error:
            return error.code
        return ErrorCode.NONE

    assert commit(nobody, -1) == ErrorCode.NONE  # a group without members belongs to everybody
    assert commit(Identity("x"), 3) == ErrorCode.ILLEGAL_GENERATION
    group = groups.get_or_create("g")
    (joined,) = await settle(group, joining(instance="a"))
    member = Identity(joined.member_id, "a")
    assert commit(member, 1) == ErrorCode.NONE
    assert commit(nobody, -1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert commit(member, 0) == ErrorCode.ILLEGAL_GENERATION
    assert commit(Identity("x"), 1) == ErrorCode.UNKNOWN_MEMBER_ID
    assert commit(Identity("x", "a"), 1) == ErrorCode.FENCED_INSTANCE_ID
    second = asyncio.ensure_future(group.join(joining()))
    await asyncio.sleep(1)
    assert commit(member, 1) == ErrorCode.NONE  # before it joins anew it commits what it has read
    await group.join(joining(*member[:1], instance="a"))
    await second
    assert commit(member, 2) == ErrorCode.REBALANCE_IN_PROGRESS
    assert groups.get("g") is group
    for one in list(group.members.values()):
        group.leave(one.who)
    assert groups.get("g") is None
    assert commit(member, 2) == ErrorCode.ILLEGAL_GENERATION


# -- how much members may say -----------------------------------------------------------------


def saying(size: int, *member_id: str, **given: Any) -> JoinRequest:
    return joining(*member_id, protocols={"range": bytes(size)}, **given)


@by_virtual_time
async def test_what_members_say_has_room_or_is_refused_and_gives_it_back_when_they_go() -> None:
    """There is room for two members, each with 1,000 bytes of subscription and of assignment."""
    group, _ = fresh(bytes_max=2 * (MEMBER_BYTES + 2000) + 500)
    first, second = await settle(group, saying(1000), saying(1000))
    for _ in range(3):  # each time all is given back
        await refused(ErrorCode.GROUP_MAX_SIZE_REACHED, group.join(saying(3000)))
        again = [group.join(saying(900, one.member_id)) for one in (first, second)]
        first, second = await asyncio.gather(*(asyncio.ensure_future(one) for one in again))
        leader = Identity(first.leader)
        assignments = {one.member_id: bytes(1000) for one in (first, second)}
        assert await group.sync(leader, first.generation, assignments) == bytes(1000)
    with pytest.raises(ApiError):
        group._memory.resize(0, 1000)
    for one in (first, second):
        group.leave(Identity(one.member_id))
    group._memory.resize(0, 2 * (MEMBER_BYTES + 2000) + 500)


@by_virtual_time
async def test_assignments_that_have_no_room_end_the_leaders_sync() -> None:
    group, _ = fresh(bytes_max=MEMBER_BYTES + 2000)
    joined = await group.join(joining())
    who = Identity(joined.member_id)
    await refused(
        ErrorCode.UNKNOWN_SERVER_ERROR, group.sync(who, 1, {joined.member_id: bytes(5000)})
    )
    assert await group.sync(who, 1, {joined.member_id: b"little"}) == b"little"


@by_virtual_time
async def test_a_group_has_so_many_members_and_ids_that_were_told() -> None:
    group, _ = fresh(members_max=2)
    with pytest.raises(MemberIdRequiredError):
        await group.join(joining(member_id_required=True))
    first = asyncio.ensure_future(group.join(joining()))
    await asyncio.sleep(0)
    await refused(ErrorCode.GROUP_MAX_SIZE_REACHED, group.join(joining(member_id_required=True)))
    await refused(ErrorCode.GROUP_MAX_SIZE_REACHED, group.join(joining()))
    await asyncio.sleep(SESSION_MS / 1000 + 1)  # the one that was told never came
    assert (await first).members
