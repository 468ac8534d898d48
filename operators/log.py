"""Kafka as the log that is the truth.

Three parts of the pipeline each own logs that nobody else writes: admission owns `admissions`; the sequencer owns `batches` and
`outcomes` of what it turns down; rank 0 owns `weights` and `steps`. An owner opens by fencing its predecessor, reads its logs to
their ends and takes up what it finds there: **the log is the owner's state**, and what Flink restores beside it is only data in flight.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple, TypeVar

from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.admin import KafkaAdminClient, NewTopic
from kafka.errors import AuthorizationError, KafkaError, KafkaTimeoutError, RetriableError, TopicAlreadyExistsError

from schemas.record import rows_of
from schemas.settings import KafkaSettings
from schemas.topics import ALL, PARTITIONED, topic

METADATA_TRIES = 20  # half a second apart

R = TypeVar("R")


class BrokerAway(ConnectionError):
    """The broker does not answer; the text says which address was tried and what to do."""


class BrokerRefuses(PermissionError):
    """The broker answers, but does not let this user do what is needed; the text says who and what."""


class NoTopic(LookupError):
    """A topic that does not exist, or holds nothing to work with; the text says what there is."""


class Message(NamedTuple):
    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes
    timestamp_ms: int


def client_config(kafka: KafkaSettings) -> dict:
    """What every kafka-python client needs to reach the broker."""
    config: dict = {
        "bootstrap_servers": kafka.bootstrap.split(","),
        "bootstrap_timeout_ms": int(kafka.timeout_s * 1000),
        "security_protocol": kafka.security_protocol,
    }
    if kafka.ssl_cafile:
        config["ssl_cafile"] = str(kafka.ssl_cafile)
    if kafka.sasl_mechanism:
        config |= {"sasl_mechanism": kafka.sasl_mechanism, "sasl_plain_username": kafka.sasl_username,
                   "sasl_plain_password": kafka.sasl_password_file.read_text().strip()}
    return config


def _reach(kafka: KafkaSettings, make):
    try:
        return make()
    except (KafkaError, OSError) as e:
        who = "" if kafka.sasl_username is None else f" as user {kafka.sasl_username!r}"
        how = "" if kafka.security_protocol == "PLAINTEXT" else f" over {kafka.security_protocol}{who}"
        # Of a wrong certificate or password the client says no more than that it could not connect.
        check = ", or check kafka.security_protocol, ssl_cafile, user and password" if how else ""
        raise BrokerAway(f"no Kafka broker answers at {kafka.bootstrap}{how} within {kafka.timeout_s:g} s ({e}): "
                         f"start one (`pipelinerl up`) or set kafka.bootstrap{check}") from e


def producer(kafka: KafkaSettings, **more) -> KafkaProducer:
    """Idempotent, acknowledged by all replicas, zstd."""
    config = client_config(kafka) | {
        "acks": "all", "compression_type": "zstd", "max_request_size": kafka.max_message_bytes,
        "max_block_ms": int(kafka.timeout_s * 1000),
    }
    return _reach(kafka, lambda: KafkaProducer(**config | more))


def consumer(kafka: KafkaSettings, **more) -> KafkaConsumer:
    """Without a group: positions are set by hand, only committed records are seen."""
    config = client_config(kafka) | {
        "enable_auto_commit": False, "isolation_level": "read_committed",
        "max_partition_fetch_bytes": kafka.max_message_bytes, "auto_offset_reset": "earliest",
    }
    return _reach(kafka, lambda: KafkaConsumer(**config | more))


def ensure_topics(kafka: KafkaSettings, run_id: str, names: Iterable[str] = ALL) -> None:
    """Create the run's topics that do not exist. Nothing is deleted by time: retention is a decision, not an age.

    Messages carry the broker's time: Flink would give a rollout the time of whatever message its operator took last.
    """
    admin = _reach(kafka, lambda: KafkaAdminClient(**client_config(kafka)))
    try:
        have = set(admin.list_topics())
        new = [
            NewTopic(topic(run_id, n), kafka.partitions if n in PARTITIONED else 1, kafka.replication, topic_configs={
                "retention.ms": "-1", "retention.bytes": "-1", "message.timestamp.type": "LogAppendTime",
                "max.message.bytes": str(kafka.max_message_bytes)})
            for n in names if topic(run_id, n) not in have
        ]
        for one in new:
            try:
                admin.create_topics([one])
            except TopicAlreadyExistsError:
                pass  # another job of the run was faster
            except AuthorizationError as e:
                raise BrokerRefuses(f"the broker at {kafka.bootstrap} does not let user {kafka.sasl_username!r} create {one.name}: a run "
                                    "must be allowed to create, write and read topics with its prefix, and its transactional ids") from e
    finally:
        admin.close()


def ends(client: KafkaConsumer, name: str) -> dict[TopicPartition, int]:
    """The end offset of each partition of a topic. Raises NoTopic."""
    partitions = asked(client.partitions_for_topic, name)
    if not partitions:
        raise NoTopic(f"there is no topic {name!r}: `pipelinerl topics` lists a run's topics")
    return asked(client.end_offsets, [TopicPartition(name, p) for p in sorted(partitions)])


def beginnings(client: KafkaConsumer, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """The first offset of each partition that the broker still has."""
    return asked(client.beginning_offsets, list(partitions))


def asked(question: Callable[..., R], *arguments) -> R:
    """What a client says of topics, asked again for ten seconds while it cannot tell: a broker that was too busy for a heartbeat is fenced
    until the next one, and its metadata names no broker so long."""
    for _ in range(METADATA_TRIES):
        try:
            return question(*arguments)
        except KafkaTimeoutError:
            raise  # it has waited for its whole time-out
        except RetriableError:
            time.sleep(0.5)
    return question(*arguments)


def read(kafka: KafkaSettings, name: str, start: int | None = None) -> Iterator[Message]:
    """Every record of a topic from `start` (default: the beginning) up to the end offsets of this moment."""
    client = consumer(kafka)
    try:
        yield from read_with(client, name, start)
    finally:
        client.close()


def read_with(client: KafkaConsumer, name: str, start: int | None = None) -> Iterator[Message]:
    until = ends(client, name)
    first = beginnings(client, until)
    client.assign(list(until))
    for tp in until:
        client.seek(tp, max(first[tp], start or 0))
    while any(client.position(tp) < end for tp, end in until.items()):
        for tp, records in client.poll(timeout_ms=200).items():
            for r in records:
                if r.offset < until[tp]:
                    yield Message(r.topic, r.partition, r.offset, r.key, r.value, r.timestamp)


def follow(client: KafkaConsumer, timeout_ms: int = 100) -> Iterator[Message]:
    """One poll of an assigned consumer."""
    for records in client.poll(timeout_ms=timeout_ms).values():
        for r in records:
            yield Message(r.topic, r.partition, r.offset, r.key, r.value, r.timestamp)


class OwnedLog:
    """Logs with one writer. Opening fences whoever wrote before: a worker that was thought dead cannot append any more.

        log = OwnedLog(kafka, owner="run.sequencer")
        for message in log.read("run.batches"): ...
        with log.transaction() as write:                   # all or nothing, in order
            offset = write("run.batches", value)
            write("run.batches", manifest)
    """

    def __init__(self, kafka: KafkaSettings, owner: str):
        self.kafka, self.owner = kafka, owner
        self._producer = producer(kafka, transactional_id=owner, transaction_timeout_ms=30_000)
        try:
            self._producer.init_transactions()
        except KafkaError as e:
            raise BrokerAway(f"{owner} could not take over its logs at {kafka.bootstrap}: {e}") from e

    def read(self, name: str) -> Iterator[Message]:
        return read(self.kafka, name)

    def rows(self, cls: type[R], name: str) -> Iterator[R]:
        """The rows of a record class in a topic, up to now."""
        return rows_of(cls, (m.value for m in self.read(name)))

    def transaction(self) -> Transaction:
        return Transaction(self._producer, self.kafka.timeout_s)

    def append(self, records: Iterable[tuple[str, bytes | None, bytes]]) -> None:
        """(topic, key, value) records as one transaction."""
        records = iter(records)
        first = next(records, None)
        if first is None:
            return  # an empty commit succeeds
        with self.transaction() as write:
            for name, key, value in itertools.chain([first], records):
                write(name, value, key)

    def close(self) -> None:
        self._producer.close(timeout=5)


class Transaction:
    """See OwnedLog. Raises kafka.errors.ProducerFencedError if another owner has opened since."""

    def __init__(self, kafka_producer: KafkaProducer, timeout_s: float):
        self._producer, self._timeout = kafka_producer, timeout_s
        self._futures: list = []

    def __enter__(self) -> Transaction:
        self._producer.begin_transaction()
        return self

    def __call__(self, name: str, value: bytes, key: bytes | None = None):
        """Returns a future; `.get().offset` after `flush()`."""
        future = self._producer.send(name, value=value, key=key)
        self._futures.append(future)
        return future

    def flush(self) -> None:
        """Wait for the acknowledgements, so that the offsets are known."""
        self._producer.flush(timeout=self._timeout)
        for f in self._futures:
            f.get(timeout=self._timeout)
        self._futures.clear()

    def __exit__(self, kind, error, trace) -> None:
        if kind is not None:
            self._producer.abort_transaction()
            return
        self.flush()
        self._producer.commit_transaction()


class Writer:
    """An idempotent producer for records that any number of writers may add: control, acks, dead letters."""

    def __init__(self, kafka: KafkaSettings):
        self.kafka = kafka
        self._producer = producer(kafka)

    def write(self, name: str, value: bytes, key: bytes | None = None) -> None:
        """Returns when the broker has it."""
        try:
            self._producer.send(name, value=value, key=key).get(timeout=self.kafka.timeout_s)
        except KafkaError as e:
            raise BrokerAway(f"could not write to {name} at {self.kafka.bootstrap}: {e}") from e

    def close(self) -> None:
        self._producer.close(timeout=5)


def wait_for_topic(kafka: KafkaSettings, name: str) -> None:
    """Block until the topic exists; NoTopic after kafka.timeout_s."""
    client = consumer(kafka)
    deadline = time.monotonic() + kafka.timeout_s
    try:
        while name not in asked(client.topics):
            if time.monotonic() > deadline:
                raise NoTopic(f"there is no topic {name!r} after {kafka.timeout_s:g} s")
            time.sleep(0.2)
    finally:
        client.close()
