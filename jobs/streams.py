"""What the three jobs share: the environment, byte streams from and to Kafka, and the way a job is started.

A job starts by `flink run -pym jobs.NAME … --settings-json FILE`, by `flink run -py jobs/NAME.py …`, or by `pipelinerl submit NAME`.
"""

from __future__ import annotations

import argparse
import sys
import zlib
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyflink.common import Configuration, Row, Types, WatermarkStrategy
from pyflink.common.serialization import ByteArraySchema, RowFieldExtractorSchema
from pyflink.datastream import DataStream, KeyedStream, StreamExecutionEnvironment
from pyflink.datastream.connectors.base import DeliveryGuarantee
from pyflink.datastream.connectors.kafka import KafkaOffsetsInitializer, KafkaRecordSerializationSchema, KafkaSink, KafkaSource
from pyflink.datastream.functions import FlatMapFunction
from pyflink.java_gateway import get_gateway

from operators.control import say
from operators.dead import DeadLetters
from operators.lifeline import die_with_parent
from operators.log import ensure_topics
from schemas.record import BadRecord, name_of, read
from schemas.settings import KafkaSettings, Settings, load
from schemas.topics import topic


def run_job(name: str, build: Callable[[StreamExecutionEnvironment, Settings], None], argv: list[str] | None = None) -> None:
    """Parse the settings, make the run's topics, wake the job's operators by a start record, execute."""
    parser = argparse.ArgumentParser(prog=f"jobs.{name}")
    parser.add_argument("--settings-json", type=Path, help="resolved settings, as `pipelinerl run` and `submit` write them")
    parser.add_argument("--settings", type=Path, help="settings as a TOML file")
    args = parser.parse_args(argv)
    settings = Settings.model_validate_json(args.settings_json.read_text()) if args.settings_json else load(args.settings)
    ensure_topics(settings.kafka, settings.run.id)
    say(settings, "start", f"{name} was submitted")
    env = StreamExecutionEnvironment.get_execution_environment(_configuration(settings))
    env.set_parallelism(1)
    env.set_max_parallelism(128)
    build(env, settings)
    env.execute(f"{settings.run.id}-{name}")


def _configuration(settings: Settings) -> Configuration:
    f = settings.flink
    conf = Configuration()
    for key, value in {
        "python.executable": sys.executable,
        "python.fn-execution.bundle.size": str(f.bundle_size),
        "python.fn-execution.bundle.time": str(f.bundle_ms),
        "execution.buffer-timeout.interval": "0 ms",  # each record at once: a flusher a task that wakes every millisecond costs more
        "restart-strategy.type": "fixed-delay",
        "restart-strategy.fixed-delay.attempts": str(f.restart_attempts),
        "restart-strategy.fixed-delay.delay": f"{int(f.restart_delay_s * 1000)} ms",
        "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION",
    }.items():
        conf.set_string(key, value)
    if f.checkpoint_dir:
        conf.set_string("execution.checkpointing.dir", f.checkpoint_dir)
    return conf


def _client_properties(kafka: KafkaSettings) -> dict[str, str]:
    props = {"max.partition.fetch.bytes": str(kafka.max_message_bytes), "fetch.max.bytes": str(kafka.max_message_bytes),
             "max.request.size": str(kafka.max_message_bytes), "security.protocol": kafka.security_protocol}
    if kafka.ssl_cafile:
        props |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(kafka.ssl_cafile)}
    if kafka.sasl_mechanism:
        module = "plain.PlainLoginModule" if kafka.sasl_mechanism == "PLAIN" else "scram.ScramLoginModule"
        password = kafka.sasl_password_file.read_text().strip()
        props |= {"sasl.mechanism": kafka.sasl_mechanism, "sasl.jaas.config": (  # the connector's jar carries its Kafka under this name
            f"org.apache.flink.kafka.shaded.org.apache.kafka.common.security.{module} required "
            f'username="{kafka.sasl_username}" password="{password}";')}
    return props


def source(env: StreamExecutionEnvironment, settings: Settings, name: str, since: datetime | None = None) -> DataStream:
    """The committed messages of one of the run's topics as bytes, from its beginning or those written since."""
    run = settings.run.id
    start = KafkaOffsetsInitializer.earliest() if since is None else KafkaOffsetsInitializer.timestamp(int(since.timestamp() * 1000))
    builder = (KafkaSource.builder().set_bootstrap_servers(settings.kafka.bootstrap)
               .set_topics(topic(run, name)).set_group_id(f"{run}.flink")
               .set_starting_offsets(start).set_value_only_deserializer(ByteArraySchema())
               .set_property("isolation.level", "read_committed").set_property("commit.offsets.on.checkpoint", "false"))
    for key, value in _client_properties(settings.kafka).items():
        builder.set_property(key, value)
    return env.from_source(builder.build(), WatermarkStrategy.no_watermarks(), name,
                           type_info=Types.PRIMITIVE_ARRAY(Types.BYTE())).uid(name)


class Gate(FlatMapFunction):
    """Lets the messages through that are of one of a topic's records; what else lies there becomes a dead letter that names the topic.

    For streams that are joined with others, behind which nobody knows any more where a message came from.
    """

    def __init__(self, settings: Settings, stage: str, name: str, *records: type):
        self.settings, self.name, self._stage, self._records = settings, name, stage, records

    def open(self, context) -> None:
        s = self.settings
        die_with_parent(silence_s=s.flink.silence_timeout_s)
        self._dead = DeadLetters(s.kafka, s.run.id, self._stage, topic(s.run.id, self.name))

    def flat_map(self, value: bytes) -> Iterator[bytes]:
        value = bytes(value)
        try:
            kind = name_of(value)
            for cls in self._records:
                if kind == cls.record_name:
                    yield from self.passed(value, cls, read(cls, value))
                    return
            raise BadRecord(f"expected a record {' or '.join(c.record_name for c in self._records)}, found {kind!r}")
        except BadRecord as e:
            self._dead(str(e), value)

    def passed(self, value: bytes, cls: type, rows: pa.Table) -> Iterator[Any]:
        """What becomes of a message of record `cls` with these rows."""
        yield value


def gated(env: StreamExecutionEnvironment, settings: Settings, stage: str, name: str, *records: type) -> DataStream:
    """`source`, with only messages of these records."""
    return through(source(env, settings, name), Gate(settings, stage, name, *records), Types.PRIMITIVE_ARRAY(Types.BYTE()))


def through(stream: DataStream, gate: Gate, output_type) -> DataStream:
    label = f"{gate.name}-gate"
    return stream.flat_map(gate, output_type=output_type).name(label).uid(label)


def keyed(rows: DataStream) -> KeyedStream:
    """Rows (slot, record) as records keyed by their slot: what `key_by` does, without the Python operator that it puts in front of
    every stream to make such rows of its records."""
    selected = rows._j_data_stream.keyBy(get_gateway().jvm.KeyByKeySelector(), Types.ROW([Types.INT()]).get_java_type_info())
    return KeyedStream(selected, Types.PRIMITIVE_ARRAY(Types.BYTE()), rows)


def dealt(stream: DataStream, control: DataStream, slots: list[int], name: str) -> KeyedStream:
    """Messages keyed by a slot, for `operators.offload`; each control record is an empty one to every slot, so that what a restored slot
    holds is taken up again."""
    rows = Types.ROW([Types.INT(), Types.PRIMITIVE_ARRAY(Types.BYTE())])
    messages = stream.map(lambda value: Row(slots[zlib.crc32(value) % len(slots)], value), output_type=rows)
    # Under this name Flink runs it beside what comes before it, at the same parallelism.
    messages.name(get_gateway().jvm.org.apache.flink.python.util.PythonConfigUtil.STREAM_KEY_BY_MAP_OPERATOR_NAME).uid(f"{name}-deal")
    wakes = control.flat_map(lambda _: [Row(slot, b"") for slot in slots], output_type=rows)
    return keyed(messages.union(wakes.name(f"{name}-wake").uid(f"{name}-wake")))


def sink(stream: DataStream, settings: Settings, name: str) -> None:
    """Rows of (key, value) to one of the run's topics, at least once."""
    builder = KafkaSink.builder().set_bootstrap_servers(settings.kafka.bootstrap).set_record_serializer(
        KafkaRecordSerializationSchema.builder().set_topic(topic(settings.run.id, name))
        .set_key_serialization_schema(RowFieldExtractorSchema(0)).set_value_serialization_schema(RowFieldExtractorSchema(1)).build()
    ).set_delivery_guarantee(DeliveryGuarantee.AT_LEAST_ONCE)
    for key, value in {**_client_properties(settings.kafka), "compression.type": "zstd", "linger.ms": "0", "acks": "all"}.items():
        builder.set_property(key, value)
    stream.sink_to(builder.build()).name(name).uid(f"{name}-sink")


def keyed_bytes():
    """Type of what `sink` takes. Made anew each time: a type as a module global cannot be pickled."""
    return Types.ROW([Types.PRIMITIVE_ARRAY(Types.BYTE()), Types.PRIMITIVE_ARRAY(Types.BYTE())])
