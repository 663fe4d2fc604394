"""Values of columns, encoded here by the rules of the published format, and read back."""

import struct
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.capture.mysql import values
from millstream.capture.mysql.buffer import BinlogBuffer
from millstream.capture.mysql.charsets import is_supported, text_decoder
from millstream.errors import ConfigError, CorruptionError


def read(reader, data):
    buffer = BinlogBuffer(data)
    value = reader(buffer)
    assert buffer.at_end
    return value


@given(st.sampled_from([1, 2, 3, 4, 8]), st.booleans(), st.data())
def test_integers_are_read_with_and_without_sign(size, unsigned, data):
    low, high = (0, 256**size - 1) if unsigned else (-(256**size) // 2, 256**size // 2 - 1)
    number = data.draw(st.integers(low, high))
    encoded = number.to_bytes(size, "little", signed=not unsigned)
    assert read(values.read_integer(size, unsigned=unsigned), encoded) == number


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_a_number_of_four_bytes_is_written_so_that_it_is_the_same_four_bytes(number):
    shown = read(values.read_float, struct.pack("<f", number))
    assert struct.pack("<f", shown) == struct.pack("<f", number)
    assert len(repr(shown)) <= len(repr(float(f"{number:.9g}")))


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_number_of_eight_bytes_is_read_as_it_is(number):
    assert read(values.read_double, struct.pack("<d", number)) == number


def encoded_decimal(number, precision, scale):
    """MySQL's decimal2bin, from its description: groups of nine digits from the point outwards."""
    sign, digits, _ = number.as_tuple()
    text = "".join(map(str, digits)).zfill(precision)[-precision:]
    before, after = text[: precision - scale], text[precision - scale :]
    lead = len(before) % 9
    groups = [before[:lead]] + [before[at : at + 9] for at in range(lead, len(before), 9)]
    groups += [after[at : at + 9] for at in range(0, len(after), 9)]
    sizes = [0, 1, 1, 2, 2, 3, 3, 4, 4, 4]
    data = bytearray(
        b"".join(int(group).to_bytes(sizes[len(group)], "big") for group in groups if group)
    )
    if sign:
        data = bytearray(byte ^ 0xFF for byte in data)
    data[0] ^= 0x80
    return bytes(data)


@given(st.integers(1, 65), st.data())
def test_decimals_are_read_with_all_their_digits(precision, data):
    scale = data.draw(st.integers(0, min(38, precision)))
    unscaled = data.draw(st.integers(-(10**precision) + 1, 10**precision - 1))
    number = Decimal((int(unscaled < 0), tuple(map(int, str(abs(unscaled)))), -scale))
    shown = read(values.read_decimal(precision, scale), encoded_decimal(number, precision, scale))
    assert shown == f"{number:f}"


@given(st.dates())
def test_dates_are_read(day):
    packed = day.day | day.month << 5 | day.year << 9
    assert read(values.read_date, packed.to_bytes(3, "little")) == day.isoformat()


@given(st.integers(0, 9999), st.integers(0, 15), st.integers(0, 31))
def test_dates_that_are_none_keep_their_numbers(year, month, day):
    packed = (day | month << 5 | year << 9).to_bytes(3, "little")
    assert read(values.read_date, packed) == f"{year:04}-{month:02}-{day:02}"


def fraction_bytes(micros, decimals):
    size = (decimals + 1) // 2
    return (micros // 100 ** (3 - size)).to_bytes(size, "big") if size else b""


@given(
    st.integers(0, 6),
    st.datetimes(datetime(1970, 1, 1, 0, 0, 1), datetime(2106, 2, 7, 6, 28, 15)),  # noqa: DTZ001
)
def test_timestamps_are_read_in_utc_with_their_decimal_places(decimals, moment):
    moment = moment.replace(tzinfo=UTC)
    micros = moment.microsecond // 10 ** (6 - decimals) * 10 ** (6 - decimals)
    seconds = int(moment.replace(microsecond=0).timestamp())
    shown = read(
        values.read_timestamp(decimals),
        seconds.to_bytes(4, "big") + fraction_bytes(micros, decimals),
    )
    whole = moment.strftime("%Y-%m-%dT%H:%M:%S")
    assert shown == whole + (f".{micros:06}"[: decimals + 1] if decimals else "") + "Z"


@given(st.integers(0, 6), st.datetimes())
def test_datetimes_are_read_with_their_decimal_places(decimals, moment):
    micros = moment.microsecond // 10 ** (6 - decimals) * 10 ** (6 - decimals)
    packed = (moment.year * 13 + moment.month) << 22 | moment.day << 17
    packed |= moment.hour << 12 | moment.minute << 6 | moment.second
    data = (packed + 0x8000000000).to_bytes(5, "big") + fraction_bytes(micros, decimals)
    whole = moment.replace(microsecond=0).isoformat()
    assert read(values.read_datetime(decimals), data) == whole + (
        f".{micros:06}"[: decimals + 1] if decimals else ""
    )


@given(st.integers(0, 6), st.integers(-3020399_000000, 3020399_000000))
def test_durations_are_read_with_their_sign(decimals, micros):
    step = 10 ** (6 - decimals)
    micros = (abs(micros) // step * step) * (-1 if micros < 0 else 1)
    size = (decimals + 1) // 2
    seconds, rest = divmod(abs(micros), 1_000_000)
    packed = (seconds // 3600 << 12 | seconds // 60 % 60 << 6 | seconds % 60) << 8 * size
    packed |= rest // 100 ** (3 - size) if size else 0
    packed = (1 << 8 * (3 + size) - 1) + (-packed if micros < 0 else packed)
    data = packed.to_bytes(3 + size, "big")
    assert read(values.read_time(decimals), data) == micros


@given(st.integers(1, 64), st.data())
def test_bits_are_read_as_digits(bits, data):
    number = data.draw(st.integers(0, 2**bits - 1))
    shown = read(values.read_bit(bits), number.to_bytes((bits + 7) // 8, "big"))
    assert (int(shown, 2), len(shown)) == (number, bits)


def test_zeros_of_a_binary_column_that_the_server_cut_off_are_put_back():
    assert read(values.read_binary(1, 4), b"\x01a") == "YQAAAA=="


def test_number_zero_of_an_enum_is_the_servers_empty_label():
    reader = values.read_enum(1, ("a", "b"))
    assert [read(reader, bytes([number])) for number in (0, 1, 2)] == ["", "a", "b"]


@given(st.sets(st.integers(0, 63)))
def test_sets_are_read_as_their_labels(members):
    labels = tuple(f"l{number}" for number in range(64))
    data = sum(1 << member for member in members).to_bytes(8, "little")
    shown = read(values.read_set(8, labels), data)
    assert [int(label[1:]) for label in shown.split(",") if label] == sorted(members)


@given(st.integers(0, 49710))
def test_days_are_counted_as_the_calendar_does(day):
    shown = read(values.read_timestamp(0), (day * 86400 + 1).to_bytes(4, "big"))
    assert shown[:10] == (date(1970, 1, 1) + timedelta(days=day)).isoformat()


def test_latin1_is_windows_code_page_with_control_characters_for_its_free_bytes():
    decode = text_decoder("latin1", "d.t.c")
    assert decode(b"\x80\xe9\x81") == "€é\x81"


def test_a_character_set_that_is_not_supported_and_bytes_that_are_no_text_are_refused():
    assert not is_supported("big5")
    with pytest.raises(ConfigError, match="CONVERT TO CHARACTER SET utf8mb4"):
        text_decoder("big5", "d.t.c")
    with pytest.raises(ConfigError, match=r"d\.t\.c holds bytes that are no text"):
        text_decoder("utf8mb4", "d.t.c")(b"\xff")


@given(st.integers(0, 2**64 - 1))
def test_packed_numbers_are_read_in_each_of_their_sizes(number):
    sizes = [(251, b"", 1), (2**16, b"\xfc", 2), (2**24, b"\xfd", 3), (2**64, b"\xfe", 8)]
    prefix, size = next((prefix, size) for limit, prefix, size in sizes if number < limit)
    assert BinlogBuffer(prefix + number.to_bytes(size, "little")).packed() == number


def test_a_packed_number_of_no_known_size_is_refused():
    with pytest.raises(CorruptionError, match="begins with byte 255"):
        BinlogBuffer(b"\xff").packed()
