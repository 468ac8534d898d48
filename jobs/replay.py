"""A topic as a file: what the run's log held at this moment, for offline analysis.

Promises: every row of every record that was committed before the call is in the file once, in the order of its partition, with where it
lay (kafka_partition, kafka_offset, kafka_timestamp); the file appears whole or not at all; memory is bounded by a row group. Bytes that
are no record are counted and named, never hidden. A topic that carries several kinds of records gives a file for each.

Reads with kafka-python: confluent-kafka takes half the processor time to read, but decoding takes four times as much as either.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from operators.log import Message, NoTopic, asked, beginnings, client_config, consumer, ends, read, read_with
from schemas import topics as names
from schemas.record import BadRecord, name_of
from schemas.record import read as read_record
from schemas.records import RECORDS, Ack, Admission, Control, Dead, Evaluation, Outcome, Prompt, Rollout, Sequence, Step, Weights
from schemas.settings import KafkaSettings
from schemas.topics import topic

#: The record a topic is named after; another kind in it goes to a file of its own.
MAIN = {names.PROMPTS: Prompt, names.HELD_OUT: Prompt, names.ADMISSIONS: Admission, names.ROLLOUTS: Rollout, names.SCORED: Rollout,
        names.BATCHES: Sequence, names.OUTCOMES: Outcome, names.WEIGHTS: Weights, names.ACKS: Ack, names.STEPS: Step,
        names.EVALUATIONS: Evaluation, names.CONTROL: Control, names.DEAD: Dead}
CLASSES = {r.record_name: r for r in RECORDS}
ORIGIN = [pa.field("kafka_partition", pa.int32(), nullable=False), pa.field("kafka_offset", pa.int64(), nullable=False),
          pa.field("kafka_timestamp", pa.timestamp("ms", tz="UTC"), nullable=False)]
GROUP_ROWS, GROUP_BYTES = 10_000, 32 << 20
FORMATS = (".parquet", ".arrow")
BAD_SHOWN = 5

log = logging.getLogger(__name__)


@dataclass
class Replayed:
    files: dict[Path, int] = field(default_factory=dict)
    """rows of each file; the topic's main record first"""
    messages: int = 0
    bad: int = 0
    """messages that are no record"""
    bad_examples: list[str] = field(default_factory=list)


def replay(kafka: KafkaSettings, topic: str, to: Path, say: Callable[[str], None] | None = None) -> int:
    """Write the rows a topic holds now to a .parquet or .arrow file; `topic` is the full name. Returns the rows of the file `to`.

    Other kinds of records in the topic go to files beside it (FILE.manifest.parquet), which `say` (default: standard error) is told,
    as it is of messages that are no record. Raises LookupError for a topic that does not exist, ValueError for another suffix, BrokerAway.
    """
    say = say or (lambda text: print(text, file=sys.stderr))
    main = next((MAIN[n] for n in MAIN if topic.endswith(f".{n}")), None)
    done = export(read(kafka, topic), to, main)
    for path, rows in list(done.files.items())[1:]:
        say(f"{rows} rows of another kind in {topic} -> {path}")
    if done.bad:
        say(f"{done.bad} of {done.messages} messages in {topic} are no record of this project and were left out:")
        for example in done.bad_examples:
            say(f"  {example}")
    return done.files[Path(to)]


def export(messages: Iterable[Message], to: Path, main: type | None = None) -> Replayed:
    """Write messages to `to`, a file for each kind of record. `main` is the kind that goes to `to` itself, also if there is none of it;
    without it the first kind that is met. Raises NoTopic if `main` is unknown and no record is met."""
    to = Path(to)
    if to.suffix not in FORMATS:
        raise ValueError(f"{to}: the suffix says the format, one of {', '.join(FORMATS)}")
    to.parent.mkdir(parents=True, exist_ok=True)
    done = Replayed()
    files: dict[str, _File] = {}
    if main is not None:
        files[main.record_name] = _File(to, main)
    try:
        for message in messages:
            done.messages += 1
            try:
                name = name_of(message.value)
                if name not in CLASSES:
                    raise BadRecord(f"no record is called {name!r}")
                rows = read_record(CLASSES[name], message.value)
            except BadRecord as e:
                done.bad += 1
                if len(done.bad_examples) < BAD_SHOWN:
                    done.bad_examples.append(f"partition {message.partition}, offset {message.offset}: {e}")
                continue
            if name not in files:
                files[name] = _File(to.with_suffix(f".{name}{to.suffix}") if files else to, CLASSES[name])
            files[name].add(rows, message)
        if not files:
            raise NoTopic(f"nothing to write to {to}: the topic holds no record, and its name does not say of which kind it would be")
        for file in files.values():
            file.finish()
        for file in files.values():  # all of them are complete
            os.replace(file.making, file.path)
            done.files[file.path] = file.rows
    finally:
        for file in files.values():
            file.abandon()
    return done


class _File:
    """Rows of one kind on their way to a file: gathered to row groups, written under another name."""

    def __init__(self, path: Path, record: type):
        self.path, self.making = path, path.with_name(f".{path.name}.{os.getpid()}")
        self.rows = self._held_bytes = 0
        self._held: list[pa.Table] = []
        self._origin: list[tuple[int, int, int]] = []
        schema: pa.Schema = record.arrow_schema
        for column in ORIGIN:
            schema = schema.append(column)
        if path.suffix == ".arrow":
            # An Arrow file has one dictionary a column, but messages bring theirs: plain text, which zstd makes as small.
            for i, column in enumerate(schema):
                if pa.types.is_dictionary(column.type):
                    schema = schema.set(i, column.with_type(column.type.value_type))
            self._writer = pa.ipc.new_file(self.making, schema, options=pa.ipc.IpcWriteOptions(compression="zstd"))
        else:
            self._writer = pq.ParquetWriter(self.making, schema, compression="zstd")
        self._schema = schema

    def add(self, rows: pa.Table, message: Message) -> None:
        self._held.append(rows)
        self._origin.extend([(message.partition, message.offset, message.timestamp_ms)] * rows.num_rows)
        self._held_bytes += len(message.value)
        if len(self._origin) >= GROUP_ROWS or self._held_bytes >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            columns = pa.concat_tables(self._held).unify_dictionaries().combine_chunks().columns
            origin = [pa.array(values, type=c.type) for values, c in zip(zip(*self._origin, strict=True), ORIGIN, strict=True)]
            self._writer.write_table(pa.Table.from_arrays([*columns, *origin], names=self._schema.names).cast(self._schema))
        self.rows += len(self._origin)
        self._held, self._origin, self._held_bytes = [], [], 0

    def finish(self) -> None:
        self._flush()
        self._writer.close()

    def abandon(self) -> None:
        self._writer.close()
        self.making.unlink(missing_ok=True)


@dataclass(frozen=True)
class TopicInfo:
    name: str
    """full name"""
    partitions: int
    records: int
    """Kafka records; an upper bound if not `exact`, since offsets also count the marks of transactions"""
    exact: bool
    bytes: int | None
    """on the broker's disk, compressed, one replica; null if the broker does not say"""
    first_step: int | None = None
    last_step: int | None = None


#: Topics whose records know a step, and how many of the last ones may have to be looked at to find one.
STEPPED = {names.BATCHES: 50, names.STEPS: 10, names.OUTCOMES: 1_000}
COUNTED_BYTES = 64 << 20  # a topic up to this size is read to be counted


def topics(kafka: KafkaSettings, run_id: str) -> list[TopicInfo]:
    """The run's topics that exist, in the order of the data's way. Raises LookupError if there is none, BrokerAway."""
    client = consumer(kafka)
    try:
        there = asked(client.topics)
        sizes = _sizes(kafka)
        found = [_info(client, run_id, name, sizes) for name in names.ALL if topic(run_id, name) in there]
    finally:
        client.close()
    if not found:
        raise NoTopic(f"run {run_id!r} has no topics at {kafka.bootstrap}: --run.id names the run, --kafka.bootstrap the broker")
    return found


def _info(client, run_id: str, name: str, sizes: dict[str, int]) -> TopicInfo:
    full = topic(run_id, name)
    until = ends(client, full)
    span = sum(until.values()) - sum(beginnings(client, until).values())
    size = sizes.get(full)
    exact = span == 0 or (size is not None and size <= COUNTED_BYTES)
    first, last = None, deque(maxlen=STEPPED.get(name, 1))
    records = 0
    for message in read_with(client, full) if span else ():
        records += 1
        last.append(message)
        if name in STEPPED and first is None:
            first = min(_steps(message), default=None)
        if not exact and (name not in STEPPED or first is not None):
            records = span
            if name in STEPPED:
                last.extend(read_with(client, full, max(until.values()) - last.maxlen))
            break
    last_step = next((max(steps) for m in reversed(last) if (steps := _steps(m))), None) if name in STEPPED else None
    return TopicInfo(full, len(until), records, exact, size, first, last_step)


def _steps(message: Message) -> list[int]:
    """The steps a message's rows speak of."""
    try:
        name = name_of(message.value)
        rows = read_record(CLASSES[name], message.value) if name in CLASSES else None
    except BadRecord:
        return []
    if rows is None or "step" not in rows.column_names:
        return []
    return [s for s in rows.column("step").to_pylist() if s is not None]


def _sizes(kafka: KafkaSettings) -> dict[str, int]:
    """Bytes of each topic, of the largest replica of each partition."""
    from kafka.admin import KafkaAdminClient
    from kafka.errors import KafkaError

    admin = KafkaAdminClient(**client_config(kafka))
    try:
        brokers = admin.describe_log_dirs()
    except KafkaError as e:  # a right that clients need not have
        log.warning("the broker does not tell the topics' sizes: %s", e)
        return {}
    finally:
        admin.close()
    partitions: dict[tuple[str, int], int] = {}
    for broker in brokers:
        for folder in broker["log_dirs"]:
            for t in folder["topics"]:
                for p in t["partitions"]:
                    key = (t["name"], p["partition_index"])
                    partitions[key] = max(partitions.get(key, 0), p["partition_size"])
    sizes: dict[str, int] = {}
    for (name, _), size in partitions.items():
        sizes[name] = sizes.get(name, 0) + size
    return sizes


def table(infos: list[TopicInfo]) -> str:
    """Topics for a person to read."""
    rows = [("topic", "partitions", "records", "bytes", "first step", "last step")]
    for i in infos:
        shown = ["" if v is None else f"{v:,}" for v in (i.partitions, i.records, i.bytes, i.first_step, i.last_step)]
        rows.append((i.name, shown[0], shown[1] if i.exact else f"<= {shown[1]}", *shown[2:]))
    widths = [max(len(r[c]) for r in rows) for c in range(len(rows[0]))]
    return "\n".join("  ".join(v.ljust(w) if c == 0 else v.rjust(w) for c, (v, w) in enumerate(zip(r, widths, strict=True))) for r in rows)
