"""Where Spark sends a bucket: the numbers by which buckets spread evenly over Spark partitions.

Spark sends a row to the Spark partition ``murmur3(bucket) mod count``. For the numbers 0, 1, 2 … a
few buckets land unevenly, and a core stands idle; so each bucket goes under a number chosen for the
place that it hashes to.
"""

from __future__ import annotations

import math

from millstream.kernels.keyhash import Buckets

_SEED = 42  # Spark's
_MODULUS_MAX = 512  # about bucket count x modulus numbers are tried
_WORD = 0xFFFFFFFF


def bucket_labels(bucket_count: int, shuffle_partitions: int, hash_seed: int = 0) -> Buckets:
    """Give one number per bucket, such that bucket b goes to Spark partition b mod partitions.

    Where it is cheap to find such numbers, that holds for every number of partitions that divides
    the number of buckets too, so that state that is rescaled later is shared evenly as well.
    """
    modulus = math.lcm(bucket_count, shuffle_partitions)
    if modulus > _MODULUS_MAX:
        modulus = shuffle_partitions
    labels: list[int] = []
    for bucket in range(bucket_count):
        wanted = bucket % modulus
        label = labels[-modulus] + 1 if len(labels) >= modulus else 0
        while _murmur3(label) % modulus != wanted:
            label += 1
        labels.append(label)
    return Buckets(tuple(labels), hash_seed)


def _murmur3(value: int) -> int:
    """Hash a 32-bit integer as Spark does; the result is signed, as its modulus must be.

    Source: Appleby's MurmurHash3_x86_32 over one word, as in Spark's Murmur3_x86_32.hashInt.
    """
    word = _rotated(value * 0xCC9E2D51 & _WORD, 15) * 0x1B873593 & _WORD
    hashed = _rotated(_SEED ^ word, 13) * 5 + 0xE6546B64 & _WORD
    hashed ^= 4
    hashed = (hashed ^ hashed >> 16) * 0x85EBCA6B & _WORD
    hashed = (hashed ^ hashed >> 13) * 0xC2B2AE35 & _WORD
    hashed ^= hashed >> 16
    return hashed - (1 << 32) if hashed >> 31 else hashed


def _rotated(word: int, bits: int) -> int:
    return (word << bits | word >> 32 - bits) & _WORD
