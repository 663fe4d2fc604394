"""Values that only their pydantic model can validate: one after the other, through the model.

The model's own rules hold (unless it is strict, pydantic takes ``"5"`` for an int); its validators
may change values, and what comes out of it is what the columns get.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.errors import ConfigError
from millstream.kernels.decode.decode_error import DecodeError
from millstream.kernels.decode.fields import Decoded, Field
from millstream.kernels.decode.row_decoder import decode_rows
from millstream.kernels.decode.row_reader import RowReader


@dataclass(frozen=True)
class PydanticReader:
    """Puts values through a pydantic model, and gives the plain values of the fields wanted."""

    model: type
    fields: tuple[Field, ...]

    def from_json(self, value: bytes | None) -> dict[str, Any]:
        """Read JSON.

        Raises:
            DecodeError: the model rejects it, or returns what a column cannot hold.
        """
        if value is None:
            raise DecodeError("the value is null")
        return self._plain(lambda: self._adapter.validate_json(value))

    def from_object(self, value: Any) -> dict[str, Any]:
        """Read what another format was decoded into.

        Raises:
            DecodeError: the model rejects it, or returns what a column cannot hold.
        """
        return self._plain(lambda: self._adapter.validate_python(value))

    def _plain(self, validate: Callable[[], Any]) -> dict[str, Any]:
        try:
            found = validate()
        except self._refusal as refusal:
            raise _fault(refusal) from None
        except Exception as error:  # a validator may raise whatever it likes
            what = f"the model {self.model.__name__} fails with {type(error).__name__}: {error}"
            raise DecodeError(what) from error
        if not isinstance(found, dict):
            found = {field.name: getattr(found, field.name) for field in self.fields}
        return RowReader(by_name=True).read(self.fields, found)

    @cached_property
    def _adapter(self) -> Any:
        return _pydantic().TypeAdapter(self.model)

    @cached_property
    def _refusal(self) -> type[Exception]:
        refusal: type[Exception] = _pydantic().ValidationError
        return refusal


@dataclass(frozen=True)
class PydanticDecoder:
    """Decodes JSON values through a pydantic model, by row."""

    reader: PydanticReader

    def decode(self, values: pa.Array) -> Decoded:
        """Decode a batch of values (binary). Rows come in the order of the values."""
        return decode_rows(
            values, np.arange(len(values)), self.reader.fields, self.reader.from_json
        )


def _fault(refusal: Any) -> DecodeError:
    """Say the first thing that a model has against a value."""
    first = refusal.errors(include_url=False)[0]
    message = str(first["msg"])
    if not first["loc"]:
        return DecodeError(f"the value does not fit its model: {message}")
    if first["type"] == "missing":
        fault = DecodeError("is missing", shown=False)
    else:
        fault = DecodeError(message[:1].lower() + message[1:], first["input"])
    for step in reversed(first["loc"]):
        fault = fault.within(f"[{step}]" if isinstance(step, int) else str(step))
    return fault


def _pydantic() -> Any:
    try:
        import pydantic  # noqa: PLC0415 - an extra
    except ImportError as error:
        raise ConfigError(
            'A topic has a pydantic model, and pydantic cannot be imported here. Install "'
            'millstream[pydantic]" wherever the job runs.'
        ) from error
    return pydantic
