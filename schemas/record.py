"""One declaration a record: a class that is the typed record, the Arrow schema and the documentation table.

    @record("control", "1.0")
    class Control:
        kind: str = col(pa.string(), "start, end_of_prompts or stop")

Messages are self-describing Arrow IPC streams: any Arrow reader opens one. The schema's metadata carries
`schema` (the name) and `version` (major.minor). A minor change adds nullable columns: a reader fills what an
older message lacks with null and ignores nullable columns it does not know; it refuses another major.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import pyarrow as pa

R = TypeVar("R")


class BadRecord(ValueError):
    """The bytes are not a message of the expected schema; the text says what was found and what was expected."""


def col(arrow: pa.DataType, doc: str, *, nullable: bool = False) -> Any:
    """A column. Nullable columns default to None: what does not exist is null, never 0."""
    metadata = {"arrow": arrow, "doc": doc, "nullable": nullable}
    if nullable:
        return dataclasses.field(default=None, metadata=metadata)
    return dataclasses.field(metadata=metadata)


def record(name: str, version: str):
    """Class decorator: keyword-only dataclass with `arrow_schema` (pa.Schema) and `record_name` on the class."""

    def decorate(cls):
        cls = dataclasses.dataclass(kw_only=True, slots=True)(cls)
        columns = [
            pa.field(f.name, f.metadata["arrow"], nullable=f.metadata["nullable"], metadata={"doc": f.metadata["doc"]})
            for f in dataclasses.fields(cls)
        ]
        cls.arrow_schema = pa.schema(
            [c.remove_metadata() for c in columns], metadata={"schema": name, "version": version}
        )
        cls.record_name = name
        return cls

    return decorate


def encode(rows: Sequence[Any]) -> bytes:
    """One message of one or more rows of the same record class."""
    cls = type(rows[0])
    names = cls.arrow_schema.names
    # One array of structs: Arrow converts a row at a time, a fifth faster for a message of one row than an array a column.
    columns = pa.array([tuple(getattr(r, n) for n in names) for r in rows], type=pa.struct(list(cls.arrow_schema))).flatten()
    return encode_batch(pa.RecordBatch.from_arrays(columns, schema=cls.arrow_schema))


def encode_batch(batch: pa.RecordBatch | pa.Table) -> bytes:
    """A record batch or table with its schema (metadata included) as one message."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write(batch)
    return sink.getvalue().to_pybytes()


def name_of(message: bytes) -> str:
    """The record name a message declares, without reading its rows. Raises BadRecord."""
    try:
        return pa.ipc.open_stream(message).schema.metadata[b"schema"].decode()
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError, KeyError, TypeError, UnicodeDecodeError) as e:
        raise BadRecord(f"{len(message)} bytes that are no Arrow IPC stream with a `schema` name: {e}") from e


def read(cls: type, message: bytes, *, checked: bool = False) -> pa.Table:
    """The rows of a message as a table of exactly `cls.arrow_schema`. Raises BadRecord.

    `checked`: an earlier operator of the same job has read it, so its buffers are sound (half the time of a small message)."""
    expected: pa.Schema = cls.arrow_schema
    try:
        table = pa.ipc.open_stream(message).read_all()
        if checked and table.schema.equals(expected):
            return table
        # A malformed buffer can parse: offsets that point outside it would crash whoever reads the lists.
        table.validate(full=True)
    except (pa.ArrowException, OSError, ValueError, TypeError) as e:
        raise BadRecord(f"{len(message)} bytes that are no Arrow IPC stream of {cls.record_name!r}: {e}") from e
    found = table.schema.metadata or {}
    name, version = found.get(b"schema", b"?").decode(), found.get(b"version", b"?").decode()
    want = expected.metadata[b"version"].decode()
    if name != cls.record_name:
        raise BadRecord(f"expected schema {cls.record_name!r}, found {name!r}")
    if version.split(".")[0] != want.split(".")[0]:
        raise BadRecord(f"{name} is version {version}; this reader knows major version {want.split('.')[0]}: upgrade it")
    if table.schema.equals(expected):
        _refuse_nulls(table, name)
        return table
    columns = []
    for f in expected:
        index = table.schema.get_field_index(f.name)
        if index < 0:
            if not f.nullable:
                raise BadRecord(f"{name} {version} lacks the column {f.name!r}")
            columns.append(pa.nulls(table.num_rows, f.type))
        else:
            try:
                columns.append(table.column(index).cast(f.type))
            except (pa.ArrowException, ValueError) as e:
                raise BadRecord(f"{name}.{f.name} is {table.schema.field(index).type}, expected {f.type}") from e
    for f in table.schema:
        if expected.get_field_index(f.name) < 0 and not f.nullable:
            raise BadRecord(f"{name} {version} has a required column {f.name!r} that this reader does not know")
    table = pa.Table.from_arrays(columns, schema=expected)
    _refuse_nulls(table, name)
    return table


def _refuse_nulls(table: pa.Table, name: str) -> None:
    for f, column in zip(table.schema, table.columns, strict=True):
        if not f.nullable and column.null_count:
            raise BadRecord(f"{name}.{f.name} is null in {column.null_count} of {table.num_rows} rows")


def decode(cls: type[R], message: bytes) -> list[R]:
    """The rows of a message as typed records. Raises BadRecord."""
    return from_table(cls, read(cls, message))


def rows_of(cls: type[R], messages: Iterable[bytes]) -> Iterator[R]:
    """The rows of those messages that are of this record; others are passed over. For whoever reads a log again: that a message is
    bad was said by a dead letter when it came."""
    for message in messages:
        try:
            yield from decode(cls, message)
        except BadRecord:
            continue


def from_table(cls: type[R], table: pa.Table) -> list[R]:
    columns = [c.to_pylist() for c in table.columns]
    return [cls(**dict(zip(table.column_names, values, strict=True))) for values in zip(*columns, strict=True)]


def markdown(cls: type) -> str:
    """The documentation table of a record."""
    head = f"### {cls.record_name} {cls.arrow_schema.metadata[b'version'].decode()}\n\n{_first_paragraph(cls)}\n\n"
    lines = ["| column | type | null | meaning |", "| --- | --- | --- | --- |"]
    for f in dataclasses.fields(cls):
        m = f.metadata
        lines.append(f"| `{f.name}` | `{m['arrow']}` | {'yes' if m['nullable'] else ''} | {m['doc']} |")
    return head + "\n".join(lines) + "\n"


def _first_paragraph(cls: type) -> str:
    return " ".join((cls.__doc__ or "").strip().split("\n\n")[0].split())
