"""Character sets of MariaDB and MySQL: which of Python's codecs decodes each as the server does.

The test against a server compares every byte of the sets with one byte a character: greek, hebrew, cp866 and koi8u
differ from Python's. A set that is not listed is refused by the preflight: its text would be a guess.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream.errors import ConfigError

BINARY_COLLATION = 63

_CODECS = {
    "ascii": "ascii",
    "utf8": "utf-8",
    "utf8mb3": "utf-8",
    "utf8mb4": "utf-8",
    "ucs2": "utf-16-be",
    "utf16": "utf-16-be",
    "utf16le": "utf-16-le",
    "utf32": "utf-32-be",
    "latin2": "iso8859-2",
    "latin5": "iso8859-9",
    "cp1250": "cp1250",
    "cp1251": "cp1251",
    "cp1256": "cp1256",
    "cp1257": "cp1257",
    "cp850": "cp850",
    "cp852": "cp852",
    "koi8r": "koi8-r",
}

# Of statements only: not each letter of a value is the server's.
_OF_SESSIONS = {
    "big5": "big5",
    "cp866": "cp866",
    "cp932": "cp932",
    "euckr": "euc_kr",
    "gb18030": "gb18030",
    "gb2312": "gb2312",
    "gbk": "gbk",
    "greek": "iso8859-7",
    "hebrew": "iso8859-8",
    "koi8u": "koi8-u",
    "latin7": "iso8859-13",
    "sjis": "shift_jis",
    "tis620": "tis-620",
    "ujis": "euc_jp",
}

UTF8_CHARSETS = frozenset(("utf8", "utf8mb3", "utf8mb4"))
# Where a byte below 128 is the letter that it is in ASCII.
ASCII_CHARSETS = frozenset(("latin1", *_CODECS)) - {"ucs2", "utf16", "utf16le", "utf32"}

# What the servers call latin1 is Windows' code page 1252, whose five free bytes are control characters.
_LATIN1 = {
    byte: bytes([byte]).decode("cp1252")
    if byte not in (0x81, 0x8D, 0x8F, 0x90, 0x9D)
    else chr(byte)
    for byte in range(256)
}

TextDecoder = Callable[[bytes], str]


def text_decoder(charset: str, column: str) -> TextDecoder:
    """Return what decodes the bytes of a column in this character set.

    Raises:
        ConfigError: from this call: the set is not supported; from the decoder: the bytes are no text in it.
    """
    if charset == "latin1":
        return _decode_latin1
    codec = _CODECS.get(charset)
    if codec is None:
        raise ConfigError(
            f"column {column} is in the character set {charset}, which capture does not decode. Convert "
            "it: ALTER TABLE … CONVERT TO CHARACTER SET utf8mb4."
        )

    def decode(data: bytes) -> str:
        try:
            return data.decode(codec)
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"column {column} holds bytes that are no text in its character set {charset}: "
                f"{error.reason} at byte {error.start}. Correct the row, or make the column binary: "
                "ALTER TABLE … MODIFY … VARBINARY(…)."
            ) from error

    return decode


def statement_text(data: bytes, charset: str) -> str:
    """Return a statement in the character set of the session that gave it; what is no text in it is U+FFFD.

    Names in it are read, and texts passed over. So every set that a session may have will do whose letters Python knows.
    """
    if charset == "latin1":
        return _decode_latin1(data)
    return data.decode(_CODECS.get(charset) or _OF_SESSIONS.get(charset, "ascii"), "replace")


def is_supported(charset: str) -> bool:
    """Say whether text in this character set can be captured."""
    return charset in ("latin1", "binary") or charset in _CODECS


def _decode_latin1(data: bytes) -> str:
    return data.decode("latin-1").translate(_LATIN1)
