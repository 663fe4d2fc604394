"""Decoding record values into tables, and the errors of those that cannot be decoded.

Fields (`fields.py`) define what a topic's values hold, a format (`formats.py`) how they are written: JSON,
Avro or plain bytes. Decoding is strict, and each record is decoded by itself: one that does not fit gets a
decode error, which names field and value, and the others are not affected.

`row_reader.py` decodes one value at a time. `json_values.py` decodes many JSON values at once, and has those
that remain undecided read by row.
"""

from millstream.kernels.decode.fields import Decoded, Decoder, Field
from millstream.kernels.decode.json_values import JsonDecoder

__all__ = ["Decoded", "Decoder", "Field", "JsonDecoder"]
