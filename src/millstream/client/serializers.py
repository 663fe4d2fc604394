"""Encodes what a program sends as the bytes of a record: key, value and headers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from millstream.client.json_values import ENCODER
from millstream.errors import ConfigError
from millstream.log.batch import RECORD_BYTES_MAX
from millstream.log.encoding import SimpleRecord, check_record_size
from millstream.record import Headers

# What a record takes besides key, value and headers.
RECORD_OVERHEAD = SimpleRecord(0, None, None).size

HeadersInput = Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]]


def encode_record(
    key: bytes | str | int | None, value: object, headers: HeadersInput | None
) -> tuple[bytes | None, bytes | None, Headers, int]:
    """Return the key, the value and the headers of a record as it is stored, and its size in bytes.

    Raises:
        ConfigError: one of them is of a type that cannot be sent.
        RecordTooLargeError: the record is larger than 64 MiB.
    """
    raw_key = encode_key(key)
    raw = value if type(value) is bytes else encode_value(value)
    pairs = encode_headers(headers) if headers else ()
    size = RECORD_OVERHEAD + len(raw_key or b"") + len(raw or b"")
    if pairs:
        size = SimpleRecord(0, raw_key, raw, pairs).size
    if size > RECORD_BYTES_MAX:
        check_record_size(size)
    return raw_key, raw, pairs, size


def encode_key(key: bytes | str | int | None) -> bytes | None:
    """Return the bytes of a key: text as UTF-8, a whole number as decimal text.

    Raises:
        ConfigError: it is of another type.
    """
    if key is None or isinstance(key, bytes):
        return key
    if isinstance(key, str):
        return _utf8(key)
    if isinstance(key, int) and not isinstance(key, bool):
        return b"%d" % key
    raise ConfigError(f"key {key!r} is a {type(key).__name__}; give bytes, str or int")


def encode_value(value: object) -> bytes | None:
    """Return the bytes of a value: text as UTF-8, other things as compact JSON:
    see :mod:`~millstream.client.json_values`.

    Raises:
        ConfigError: JSON cannot express it.
    """
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _utf8(value)
    if isinstance(value, bytearray | memoryview):
        return bytes(value)
    try:
        return ENCODER.encode(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the value {value!r:.200} cannot be sent: {error}; give bytes, str, or an event: a "
            "mapping, a dataclass or a pydantic model of what a schema can have"
        ) from error


def encode_headers(headers: HeadersInput | None) -> Headers:
    """Return the headers of a record, in their order; text as UTF-8. A name may come twice.

    Raises:
        ConfigError: they are not pairs of a text and bytes, text or None.
    """
    if not headers:
        return ()
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    try:
        return tuple((_name(name), _header_value(value)) for name, value in pairs)
    except (TypeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"the headers {headers!r:.200} are not pairs of a name and a value; give a mapping, "
            "or pairs such as [('trace', b'17')]"
        ) from error


def _name(name: object) -> str:
    if not isinstance(name, str):
        raise ConfigError(f"the header name {name!r:.200} is a {type(name).__name__}; give a str")
    _utf8(name)
    return name


def _header_value(value: object) -> bytes | None:
    if isinstance(value, str):
        return _utf8(value)
    if value is None or isinstance(value, bytes):
        return value
    raise ConfigError(
        f"the header value {value!r:.200} is a {type(value).__name__}; give bytes, str or None"
    )


def _utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"the text {text!r:.200} is not valid Unicode ({error.reason}); send bytes instead"
        ) from error
