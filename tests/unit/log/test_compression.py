"""Compression as Kafka stores it: what is read, what is written, and what is refused."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import replace

import cramjam
import google_crc32c
import lz4.frame
import pyarrow as pa
import pytest
import snappy
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import ConfigError, CorruptBatchError
from millstream.log import decoding
from millstream.log.batch import HEADER_BYTES, LOG_APPEND_TIME, EncodedBatch, finish, walk
from millstream.log.compression import (
    COMPRESSIONS,
    DECOMPRESSED_BYTES_MAX,
    CompressionName,
    compress,
    decompress,
)
from millstream.log.decoding import Block, decode, decode_parts
from millstream.log.encoding import SimpleRecord, encode_records
from millstream.log.markers import encode_marker

CODECS = [name for name in COMPRESSIONS if name != "none"]
XERIAL = b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1)
MEBIBYTE = bytes(1 << 20)


def batch_of(value: bytes, count: int = 1) -> EncodedBatch:
    return encode_records([SimpleRecord(5, b"k", value)] * count)


def body_of(batch: EncodedBatch) -> bytes:
    return batch.tail[HEADER_BYTES - 17 :]


def block_of(*batches: EncodedBatch) -> Block:
    data, offset = b"", 0
    for batch in batches:
        data += batch.prefix(offset, 0) + batch.tail
        offset += batch.count
    return Block(data, list(walk(data, 0)), "a.log", 1000)


def with_body(body: bytes, code: int, records: int = 1) -> EncodedBatch:
    return finish(body, records=records, timestamps_ms=(0, 0), attributes=code)


@pytest.mark.parametrize("name", CODECS)
def test_only_the_records_are_compressed_and_the_header_says_how(name: CompressionName) -> None:
    batch = batch_of(b"the same " * 100)
    made = compress(batch, name)
    assert made.size < batch.size
    assert made.attributes == COMPRESSIONS.index(name)
    assert made.tail[6 : HEADER_BYTES - 17] == batch.tail[6 : HEADER_BYTES - 17]
    assert decompress(body_of(made), made.attributes) == body_of(batch)
    assert replace(made, tail=b"", attributes=0) == replace(batch, tail=b"")


@pytest.mark.parametrize("name", CODECS)
def test_a_batch_that_would_not_become_smaller_is_left_as_it_is(name: CompressionName) -> None:
    batch = batch_of(b"v")
    assert compress(batch, name) is batch


def test_no_compression_and_what_is_compressed_already_is_left_as_it_is() -> None:
    batch = batch_of(b"the same " * 100)
    made = compress(batch, "zstd")
    assert compress(batch, "none") is batch
    assert compress(made, "gzip") is made
    marker = encode_marker(
        commit=True, producer_id=1, producer_epoch=0, leader_epoch=0, timestamp_ms=0
    )
    assert compress(marker, "gzip") is marker


def test_a_codec_that_does_not_exist_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"'brotli'\. Choose .none., .gzip."):
        compress(batch_of(b"v"), "brotli")  # type: ignore[arg-type]


@pytest.mark.parametrize("size", [100, 1 << 16, (1 << 16) + 1, 300_000])
def test_lz4_is_written_in_frames_of_independent_blocks(size: int) -> None:
    packed = body_of(compress(batch_of(b"some text " * (size // 10)), "lz4"))
    assert lz4.frame.get_frame_info(packed)["block_linked"] is False
    assert lz4.frame.decompress(packed)
    assert bytes(cramjam.lz4.decompress(packed))


@pytest.mark.not_in_lane("thresholds", "it knows the size of blocks")
def test_an_lz4_block_that_does_not_become_smaller_is_stored() -> None:
    noise = bytes(cramjam.zstd.compress(b"".join(b"%d" % n for n in range(60_000))))[:65_536]
    made = compress(batch_of(noise + bytes(100_000)), "lz4")
    assert lz4.frame.decompress(body_of(made)) == decompress(body_of(made), 3)
    assert noise[:1000] in body_of(made)


@given(st.binary(max_size=3000).map(lambda some: some * 50))
def test_every_form_that_other_programs_write_is_read(plain: bytes) -> None:
    raw = snappy.compress(plain)
    half = len(plain) // 2
    blocks = [snappy.compress(plain[:half]), snappy.compress(plain[half:])]
    xerial = XERIAL + b"".join(struct.pack(">i", len(one)) + one for one in blocks)
    little_endian = xerial[:8] + struct.pack("<ii", 1, 1) + xerial[16:]  # as Redpanda writes it
    for packed in (raw, xerial, little_endian):
        assert decompress(packed, 2) == plain
    assert decompress(bytes(cramjam.gzip.compress(plain)), 1) == plain
    linked = lz4.frame.compress(plain, block_linked=True, store_size=True, content_checksum=True)
    assert decompress(linked, 3) == plain
    streamed = zstandard.ZstdCompressor(write_content_size=False).compress(plain)
    assert decompress(streamed, 4) == plain
    assert decompress(streamed + streamed, 4) == plain * 2


@pytest.mark.parametrize("name", CODECS)
def test_a_body_that_is_cut_short_or_has_more_behind_it_is_refused(name: CompressionName) -> None:
    packed = body_of(compress(batch_of(b"the same " * 100_000), name))
    for broken in (packed[:-1], packed[: len(packed) // 2], packed[:9], packed + b"more of it"):
        with pytest.raises(CorruptBatchError, match=f"byte 7 of b.log .offset 3 .* {name}"):
            decompress(broken, COMPRESSIONS.index(name), path="b.log", position=7, offset=3)


@pytest.mark.parametrize("code", [5, 6, 7])
def test_a_codec_that_nobody_has_given_a_meaning_is_refused(code: int) -> None:
    with pytest.raises(CorruptBatchError, match=f"name codec {code}, and only 0 to 4 exist"):
        decode(block_of(with_body(b"0" * 50, code)), 0, 1)


def test_an_empty_body_and_a_count_that_lies_are_refused_before_anything_is_allocated() -> None:
    for body in (b"", compress_raw(b"abcdefg" * 3)):
        for count in (4, (1 << 31) - 1):
            with pytest.raises(CorruptBatchError, match=f"record count is {count}"):
                decode(block_of(with_body(body, 4, count)), 0, 1, ("offset",))


def compress_raw(body: bytes) -> bytes:
    return zstandard.ZstdCompressor().compress(body)


BOMBS = {
    "gzip": bytes(cramjam.gzip.compress(MEBIBYTE)) * 300,
    "snappy": XERIAL
    + (struct.pack(">i", len(snappy.compress(MEBIBYTE))) + snappy.compress(MEBIBYTE)) * 300,
    "lz4": lz4.frame.compress(MEBIBYTE) * 300,
    "zstd": compress_raw(MEBIBYTE) * 300,
}


@pytest.mark.parametrize("name", CODECS)
def test_a_bomb_is_refused_before_it_takes_more_than_the_limit(name: CompressionName) -> None:
    block = block_of(with_body(BOMBS[name], COMPRESSIONS.index(name)))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptBatchError, match=r"take more than 268,435,456 bytes"):
            decode(block, 0, 1)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < DECOMPRESSED_BYTES_MAX + (32 << 20)


@pytest.mark.parametrize("size", [1, 255, 256, 257, 65_791, 65_792, 300_000])
def test_zstd_frames_of_every_size_are_read_and_their_claims_not_believed(size: int) -> None:
    plain = b"some text " * (size // 10) + b"." * (size % 10)
    packed = compress_raw(plain)
    assert decompress(packed, 4) == plain
    assert decompress(packed + compress_raw(b"more"), 4) == plain + b"more"
    width = {0: 1, 1: 2, 2: 4}[packed[4] >> 6]  # no window and no dictionary stand before the size
    for claim in (0, 5, 255):
        lie = packed[:5] + bytes([claim]) * width + packed[5 + width :]
        if lie != packed:
            with pytest.raises(CorruptBatchError, match="zstd"):
                decompress(lie, 4)


def test_a_zstd_frame_that_claims_gibibytes_is_refused_by_its_claim() -> None:
    claim = b"\x28\xb5\x2f\xfd\xa0" + struct.pack("<I", 1 << 31) + compress_raw(b"abc")[6:]
    with pytest.raises(CorruptBatchError, match="take more than"):
        decompress(claim, 4)


def test_a_snappy_block_that_claims_gibibytes_is_refused_by_its_claim() -> None:
    claim = b"\xff\xff\xff\xff\x0f" + b"\0abc"
    for body in (claim, XERIAL + struct.pack(">i", len(claim)) + claim):
        with pytest.raises(CorruptBatchError, match="take more than"):
            decompress(body, 2)


def test_compressed_batches_are_decoded_in_parts_that_stay_small(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batches = [compress(batch_of(b"%d " % n * 2000), COMPRESSIONS[n % 5]) for n in range(10)]
    monkeypatch.setattr(decoding, "DECODED_BYTES_MAX", 10_000)
    parts = list(decode_parts(block_of(*batches), 0, 10))
    assert [part.num_rows for part in parts] == [2] * 5
    whole = decode(block_of(*batches), 0, 10)
    assert whole["offset"].to_pylist() == list(range(10))
    assert whole["value"].to_pylist() == [b"%d " % n * 2000 for n in range(10)]
    assert decode(block_of(*batches), 3, 6)["offset"].to_pylist() == [3, 4, 5]
    assert decode(block_of(*batches), 10, 20).num_rows == 0


def test_an_error_names_the_compressed_batch_as_it_lies_in_the_file() -> None:
    good = compress(batch_of(b"the same " * 100), "gzip")
    bad = with_body(compress_raw(b"\x7f" * 500), 4)
    with pytest.raises(CorruptBatchError, match="a record length") as caught:
        decode(block_of(good, bad), 0, 2)
    assert caught.value.position == 1000 + good.size


@pytest.mark.parametrize("name", CODECS)
def test_log_append_time_counts_in_compressed_batches(name: CompressionName) -> None:
    made = compress(encode_records([SimpleRecord(n, None, b"v" * 300) for n in range(5)]), name)
    tail = bytearray(made.tail)
    tail[5] |= LOG_APPEND_TIME
    struct.pack_into(">q", tail, 35 - 17, 777)
    tail[:4] = google_crc32c.value(bytes(tail[4:])).to_bytes(4, "big")
    found = decode(block_of(replace(made, tail=bytes(tail)), made), 0, 10)
    times = found["timestamp"].cast(pa.int64()).to_pylist()
    assert times == [777] * 5 + [0, 1, 2, 3, 4]
