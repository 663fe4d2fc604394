"""What a topic's records hold, as it is declared: schema, format, and columns of the record itself."""

from __future__ import annotations

import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pyarrow as pa

from millstream.choices import choose
from millstream.errors import ConfigError
from millstream.kernels.decode.avro_values import AvroFormat
from millstream.kernels.decode.fields import Field, Meta
from millstream.kernels.decode.formats import BytesFormat, JsonFormat, ValueFormat
from millstream.kernels.decode.records import META_TYPES, meta_field
from millstream.kernels.decode.registry_values import RegistryFormat
from millstream.kernels.errors.dead_letters import BadRecordPolicy
from millstream.pipeline.avro import AvroSchema, fields_of_avro, read_schema, read_schemas
from millstream.pipeline.expressions import names_given
from millstream.pipeline.schema import Declaration, Schema, schema_of
from millstream.schema_registry import check_registry

FormatName = Literal["json", "avro", "bytes"]
Metadata = Sequence[Meta]
_WHOLE_VALUE = Field("value", pa.binary(), required=False)


@dataclass(frozen=True)
class TopicDeclaration:
    """What the keyword arguments of :meth:`millstream.App.topic` say of a topic's records."""

    topic: str
    schema: Declaration | None
    format: FormatName
    avro_schema: AvroSchema | None
    avro_schemas: Mapping[int, AvroSchema] | str | Path | None
    metadata: Metadata
    registry: str | None = None

    def read(self) -> tuple[tuple[Field, ...], ValueFormat]:
        """Give the fields, those of the record itself last, and the format of the values.

        Raises:
            ConfigError: what was said does not fit together, or is not known.
        """
        if self.format != "avro" and (self.avro_schema or self.avro_schemas):
            raise ConfigError(
                f"{self.what} has an Avro schema and format={self.format!r}. Give "
                'format="avro", or leave the Avro schema out.'
            )
        if self.registry is not None:
            fields, values = self._of_registry(self.registry)
            return (*fields, *self._meta(fields)), values
        readers = {"json": self._json, "avro": self._avro, "bytes": self._bytes}
        fields, values = readers[
            choose(f"the format of {self.what}", self.format, tuple(readers))
        ]()
        return (*fields, *self._meta(fields)), values

    @property
    def what(self) -> str:
        return f"topic {self.topic!r}"

    def _json(self) -> tuple[tuple[Field, ...], ValueFormat]:
        if self.schema is None:
            raise ConfigError(
                f"{self.what} has no schema. Give a dataclass, a pydantic model, a TypedDict or a mapping, or "
                'format="bytes" for values as they are.'
            )
        found = schema_of(self.schema, what=self.what)
        return found.fields, JsonFormat(found.model)

    def _avro(self) -> tuple[tuple[Field, ...], ValueFormat]:
        if (self.avro_schema is None) == (self.avro_schemas is None):
            raise ConfigError(
                f'{self.what} has format="avro". Give either avro_schema=, by which the values '
                "were written, or avro_schemas=, by number, for values in Confluent's form."
            )
        if self.avro_schema is not None:
            writer = read_schema(self.avro_schema, what=self.what)
            found = self._reader_schema(writer)
            return found.fields, AvroFormat(writer, None, found.model)
        assert self.avro_schemas is not None
        by_number = read_schemas(self.avro_schemas, what=self.what)
        found = self._reader_schema(by_number[max(by_number)])
        return found.fields, AvroFormat(None, by_number, found.model)

    def _of_registry(self, registry: str) -> tuple[tuple[Field, ...], ValueFormat]:
        if self.format != "json":
            raise ConfigError(
                f"{self.what} has a schema registry and format={self.format!r}. Each value names its schema, which says "
                "how it is written: leave the format out."
            )
        if self.schema is None:
            raise ConfigError(
                f"{self.what} has a schema registry and no schema of its own. Give a class or a mapping: it chooses among "
                "the fields, and stays the same when the registry gets newer schemas."
            )
        check_registry(registry, what=self.what)
        found = schema_of(self.schema, what=self.what)
        return found.fields, RegistryFormat(registry, found.model)

    def _reader_schema(self, newest: Mapping[str, object]) -> Schema:
        if self.schema is not None:
            return schema_of(self.schema, what=self.what)
        return Schema(fields_of_avro(newest, what=self.what))

    def _bytes(self) -> tuple[tuple[Field, ...], ValueFormat]:
        if self.schema is not None:
            raise ConfigError(
                f'{self.what} has format="bytes" and a schema. Leave the schema out: the columns '
                "are value and key."
            )
        fields = (_WHOLE_VALUE,) if "key" in self.metadata else (_WHOLE_VALUE, meta_field("key"))
        return fields, BytesFormat()

    def _meta(self, fields: tuple[Field, ...]) -> list[Field]:
        if isinstance(self.metadata, str) or not isinstance(self.metadata, Sequence):
            raise ConfigError(
                f"{self.what} has metadata={self.metadata!r}. Give a tuple of names, such as "
                '("key",).'
            )
        for name in self.metadata:
            choose(f"the metadata of {self.what}", name, tuple(META_TYPES))
            if name in {field.name for field in fields}:
                raise ConfigError(
                    f"{self.what} asks for the metadata {name!r}, and its schema has a field of "
                    "that name. Rename the field; with pydantic, an alias keeps its name in the "
                    "value."
                )
        return [meta_field(name) for name in dict.fromkeys(self.metadata)]


def check_topic_key(topic: str, key: str, fields: Sequence[Field]) -> None:
    """Refuse a key that is not a field of the topic."""
    what = f"The key of topic {topic!r}"
    names_given([key], what)
    names = [field.name for field in fields]
    if key not in names:
        raise ConfigError(f"{what} is {key!r}. Its fields are {', '.join(names)}.")


def check_policy(topic: str, bad: BadRecordPolicy) -> None:
    """Refuse a policy for bad records that there is not."""
    choose(f"bad of topic {topic!r}", bad, typing.get_args(BadRecordPolicy))
