"""A job for tests of the stack: answers a record with `attempt|record`. Between checkpoints no bundle ends.

    python -m ... held_job BOOTSTRAP RECORDS WAKES SINK CHECKPOINTS
"""

import sys

from pyflink.common import Configuration, Types, WatermarkStrategy
from pyflink.common.serialization import ByteArraySchema
from pyflink.datastream import StreamExecutionEnvironment
from pyflink.datastream.connectors.kafka import KafkaOffsetsInitializer, KafkaRecordSerializationSchema, KafkaSink, KafkaSource

from jobs.streams import dealt
from operators.offload import Offload, slot_keys


class Echo:
    """Answers at once."""

    def __init__(self):
        self._answers = []

    def submit(self, ident, record, attempt):
        self._answers.append((ident, [b"%d|%s" % (attempt, record)]))

    def drain(self):
        answers, self._answers = self._answers, []
        return answers

    def poll(self):
        pass

    def close(self):
        pass


def main(bootstrap, records, wakes, sink, checkpoints):
    conf = Configuration()
    for key, value in {"python.fn-execution.bundle.size": "1000000", "python.fn-execution.bundle.time": "3600000",
                       "execution.checkpointing.dir": checkpoints, "python.executable": sys.executable,
                       "execution.checkpointing.externalized-checkpoint-retention": "RETAIN_ON_CANCELLATION"}.items():
        conf.set_string(key, value)
    env = StreamExecutionEnvironment.get_execution_environment(conf)
    env.set_parallelism(1)
    env.enable_checkpointing(3_600_000)  # they are triggered by the test

    def source(topic):
        reader = (KafkaSource.builder().set_bootstrap_servers(bootstrap).set_topics(topic).set_group_id("held")
                  .set_starting_offsets(KafkaOffsetsInitializer.earliest()).set_value_only_deserializer(ByteArraySchema()).build())
        return env.from_source(reader, WatermarkStrategy.no_watermarks(), topic, type_info=Types.PRIMITIVE_ARRAY(Types.BYTE())).uid(topic)

    writer = (KafkaSink.builder().set_bootstrap_servers(bootstrap).set_record_serializer(
        KafkaRecordSerializationSchema.builder().set_topic(sink).set_value_serialization_schema(ByteArraySchema()).build()).build())
    (dealt(source(records), source(wakes), slot_keys(4), "held")
     .process(Offload(lambda runtime: Echo()), output_type=Types.PRIMITIVE_ARRAY(Types.BYTE())).uid("held").sink_to(writer))
    env.execute("held")


if __name__ == "__main__":
    main(*sys.argv[1:])
