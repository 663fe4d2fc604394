"""Decoding record values into tables, and setting aside the ones that cannot be decoded.

What a topic's values hold is told by fields (`fields.py`), how they are written by a format
(`formats.py`): JSON, Avro or plain bytes. Decoding is strict and keeps records apart: one that does
not fit becomes *dead*, with a sentence that names field and value, and its neighbours go on.

One value at a time, `row_reader.py` says what is good, and why something is not. Blocks of JSON values
are decoded many at a time (`json_values.py`), and what that cannot vouch for is read again by row.
"""

from millstream.kernels.decode.fields import Decoded, Decoder, Field
from millstream.kernels.decode.json_values import JsonDecoder

__all__ = ["Decoded", "Decoder", "Field", "JsonDecoder"]
