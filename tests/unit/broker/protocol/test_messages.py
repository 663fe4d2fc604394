"""Every message in every version: there and back, as another implementation has it, and malformed."""

from __future__ import annotations

import struct
import uuid
from collections.abc import Iterator
from functools import cache

import pytest
from example_counts import some
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kafka.protocol.api_message import ApiMessage

from millstream.broker.call import Call
from millstream.broker.dispatch import (
    HANDLERS,
    NON_PRODUCE_BYTES_MAX,
    Peer,
    UnknownRequestError,
    decode_call,
    encode_frame,
)
from millstream.broker.protocol.messages import API_VERSIONS, APIS
from millstream.broker.protocol.schema import Api, FieldSpec, parse
from millstream.broker.protocol.wire import (
    ELEMENTS_MAX,
    ByteReader,
    MalformedError,
    Message,
    uvarint,
)

# Few of many: each example goes through all versions. What fails is small as it is.
FEW = settings(max_examples=some(6), phases=[Phase.generate])
PEER = Peer("127.0.0.1", 9092, "127.0.0.2")
CASES = [(api, direction) for api in APIS.values() for direction in ("request", "response")]
NAMES = [f"{api.name}-{direction}" for api, direction in CASES]
# kafka-python speaks no share groups; that these are Kafka's own messages, the Java client shows.
KNOWN_TO_IT = [api for api in APIS.values() if "Share" not in api.name]

_INTEGERS = {
    f"int{bits}": st.integers(-(1 << bits - 1), (1 << bits - 1) - 1) for bits in (8, 16, 32, 64)
}
_SCALARS = {
    **_INTEGERS,
    "bool": st.booleans(),
    "uuid": st.binary(min_size=16, max_size=16),
    "string": st.text(max_size=20),
    "bytes": st.binary(max_size=200),
    "records": st.binary(max_size=200),
}


def versions(api: Api) -> range:
    return range(api.versions[0], api.versions[1] + 1)


def values_of(field: FieldSpec, version: int) -> st.SearchStrategy:
    if field.kind == "[]":
        strategy = st.lists(messages_of(field.fields, version), max_size=3)
    elif field.kind == "{}":
        strategy = messages_of(field.fields, version)
    elif field.kind.startswith("[]"):
        strategy = st.lists(_SCALARS[field.kind[2:]], max_size=3)
    else:
        strategy = _SCALARS[field.kind]
    return st.none() | strategy if version >= field.null else strategy


def messages_of(fields: list[FieldSpec], version: int) -> st.SearchStrategy:
    here = {one.name: values_of(one, version) for one in fields if one.first <= version <= one.last}
    return st.fixed_dictionaries(here)


def encoded(api: Api, direction: str, message: Message, version: int) -> bytes:
    out: list[bytes] = []
    (api.encode_request if direction == "request" else api.encode_response)(message, version, out)
    return b"".join(out)


def decoded(api: Api, direction: str, data: bytes, version: int) -> Message:
    read = api.decode_request if direction == "request" else api.decode_response
    return read(ByteReader(data), version)


def only(message: Message, like: Message) -> Message:
    """Leave out what another version has, at any depth."""
    return {
        key: [only(one, two) for one, two in zip(message[key], value, strict=True)]
        if isinstance(value, list) and value and isinstance(value[0], dict)
        else message[key]
        for key, value in like.items()
    }


def without_rights(message: Message) -> Message:
    """Leave out the bit fields that kafka-python names and shows in its own way."""
    return {
        key: [without_rights(one) if isinstance(one, dict) else one for one in value]
        if isinstance(value, list)
        else value
        for key, value in message.items()
        if not key.endswith("authorized_operations")
    }


@pytest.mark.parametrize(("api", "direction"), CASES, ids=NAMES)
@FEW
@given(data=st.data())
def test_what_is_written_is_read(api, direction, data) -> None:
    for version in versions(api):
        message = data.draw(messages_of(getattr(api, direction), version))
        found = decoded(api, direction, encoded(api, direction, message, version), version)
        assert only(found, message) == message


# -- kafka-python, which was made from Kafka's own definitions --------------------------------


@cache
def theirs(api: Api, direction: str) -> type[ApiMessage]:
    def below(cls: type) -> Iterator[type]:
        for one in cls.__subclasses__():
            yield one
            yield from below(one)

    return next(one for one in below(ApiMessage) if one.__name__ == api.name + direction.title())


def as_ours(value: object) -> object:
    if isinstance(value, dict):
        return {key: as_ours(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_ours(one) for one in value]
    return value.bytes if isinstance(value, uuid.UUID) else value


@pytest.mark.parametrize("direction", ["request", "response"])
@pytest.mark.parametrize("api", KNOWN_TO_IT, ids=lambda api: api.name)
@FEW
@given(data=st.data())
def test_kafka_python_reads_and_writes_the_same_bytes(api, direction, data) -> None:
    for version in versions(api):
        message = data.draw(messages_of(getattr(api, direction), version))
        if api is API_VERSIONS and direction == "response":
            message["error_code"] = 0  # else it takes every version for the oldest
        ours = encoded(api, direction, message, version)
        found = theirs(api, direction).decode(ours, version=version)
        like = without_rights(message)
        assert only(as_ours(found.to_dict(json=False)), like) == like
        found._header = None  # it looks there for the version that was asked for
        assert bytes(found.encode(version=version)) == ours


def test_names_and_ranges_are_those_of_kafka() -> None:
    for api in KNOWN_TO_IT:
        request = theirs(api, "request")
        assert (request.API_KEY, request.name) == (api.key, f"{api.name}Request")
        assert api.versions[1] <= request.max_version
        for version in versions(api):
            assert api.flexible(version) == request.flexible_version_q(version)


def test_what_is_described_is_answered() -> None:
    assert set(HANDLERS) == set(APIS.values())


# -- bytes that are no message ----------------------------------------------------------------


@pytest.mark.parametrize("api", APIS.values(), ids=lambda api: api.name)
@settings(max_examples=some(25))
@given(data=st.data())
def test_a_request_that_was_changed_is_read_or_refused(api, data) -> None:
    version = data.draw(st.sampled_from(versions(api)))
    message = data.draw(messages_of(api.request, version))
    good = encoded(api, "request", message, version)
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        if bad:
            bad[data.draw(st.integers(0, len(bad) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(bad)))
    for raw in (bytes(bad), bytes(bad[:cut]), good[:cut]):
        try:
            decoded(api, "request", raw, version)
        except MalformedError:
            continue


@given(st.binary(max_size=64))
def test_a_frame_of_anything_is_read_or_refused(frame) -> None:
    try:
        decode_call(frame, PEER)
    except (MalformedError, UnknownRequestError):
        return


def test_an_array_is_not_believed_to_be_longer_than_the_message() -> None:
    api = APIS[3]
    for count in (ELEMENTS_MAX, 1 << 30, -5):
        with pytest.raises(MalformedError, match="array"):
            api.decode_request(ByteReader(struct.pack(">i", count) + bytes(100)), 1)
    many = struct.pack(">i", ELEMENTS_MAX + 1) + bytes(2 * ELEMENTS_MAX + 2)
    with pytest.raises(MalformedError, match="array"):
        api.decode_request(ByteReader(many), 1)


def test_null_is_refused_where_there_must_be_something() -> None:
    api = APIS[3]
    assert api.decode_request(ByteReader(struct.pack(">i", -1)), 1)["topics"] is None
    with pytest.raises(MalformedError, match="null"):
        api.decode_request(ByteReader(struct.pack(">i", -1)), 0)


def test_a_string_that_is_not_utf_8_is_refused() -> None:
    with pytest.raises(MalformedError, match="UTF-8"):
        APIS[3].decode_request(ByteReader(struct.pack(">ih", 1, 1) + b"\xff"), 0)


def test_a_tagged_field_that_nobody_knows_is_passed_over() -> None:
    plain = encoded(API_VERSIONS, "request", {"client_software_name": "x"}, 3)
    assert plain.endswith(b"\0")
    for tag in (0, 9, 300):
        more = plain[:-1] + b"\x01" + uvarint(tag) + b"\x03abc"
        assert decoded(API_VERSIONS, "request", more, 3)["client_software_name"] == "x"
    with pytest.raises(MalformedError):
        decoded(API_VERSIONS, "request", plain[:-1] + b"\x01\x09\x7f" + b"abc", 3)


def test_a_tagged_field_must_be_as_long_as_it_says() -> None:
    message = {"finalized_features_epoch": 7}
    good = encoded(API_VERSIONS, "response", message, 3)
    assert good.endswith(b"\x01\x01\x08" + bytes(7) + b"\x07")
    bad = good[:-9] + b"\x09" + good[-8:] + b"\0"
    with pytest.raises(MalformedError, match="finalized_features_epoch"):
        decoded(API_VERSIONS, "response", bad, 3)


@given(st.integers(0, (1 << 32) - 1))
def test_unsigned_varints_come_back(number) -> None:
    assert ByteReader(uvarint(number)).uvarint() == number


def test_an_endless_varint_is_refused() -> None:
    with pytest.raises(MalformedError, match="varint"):
        ByteReader(b"\x80" * 6).uvarint()


# -- frames -----------------------------------------------------------------------------------


def test_a_header_is_read_in_both_forms() -> None:
    plain = struct.pack(">hhih3s", 3, 1, 77, 3, b"abc") + struct.pack(">i", -1)
    call = decode_call(plain, PEER)
    assert (call.version, call.correlation_id, call.client_id) == (1, 77, "abc")
    flexible = struct.pack(">hhih", 3, 9, 78, -1) + b"\x01\x05\x02zz" + b"\0\x01\0\0\0"
    call = decode_call(flexible, PEER)
    assert (call.version, call.correlation_id, call.client_id) == (9, 78, "")
    assert call.request["topics"] is None


def test_a_newer_apiversions_is_answered_in_the_oldest_form() -> None:
    call = decode_call(struct.pack(">hhi", 18, 99, 5) + b"\xff\xff", PEER)
    frame = b"".join(encode_frame(call, {"error_code": 35, "api_keys": []}))
    assert frame == struct.pack(">iihi", 10, 5, 35, 0)


def test_the_header_of_the_answer_to_apiversions_is_never_flexible() -> None:
    call = Call(API_VERSIONS, 3, 5, "", {}, *PEER)
    frame = b"".join(encode_frame(call, {"api_keys": []}))
    assert frame[4:] == struct.pack(">ihBiB", 5, 0, 1, 0, 0)
    flexible = b"".join(encode_frame(Call(APIS[3], 9, 5, "", {}, *PEER), {}))
    assert flexible[4:9] == struct.pack(">ib", 5, 0)


@pytest.mark.parametrize(("key", "version"), [(4, 0), (17, 2), (999, 0), (-1, 0), (0, 9), (1, 3)])
def test_what_is_not_answered_is_named(key, version) -> None:
    with pytest.raises(UnknownRequestError, match=f"version {version}"):
        decode_call(struct.pack(">hhih", key, version, 1, -1), PEER)


def test_only_records_make_a_request_large() -> None:
    head = struct.pack(">hhih", 11, 5, 1, -1)
    with pytest.raises(MalformedError, match="JoinGroup"):
        decode_call(head + bytes(NON_PRODUCE_BYTES_MAX), PEER)
    records = encoded(APIS[0], "request", {"topic_data": []}, 7)
    assert decode_call(
        struct.pack(">hhih", 0, 7, 1, -1) + records + bytes(NON_PRODUCE_BYTES_MAX), PEER
    )


def test_a_line_that_is_none_of_a_table_is_refused() -> None:
    with pytest.raises(AssertionError, match="not a line"):
        parse("name string 3+ sometimes")
