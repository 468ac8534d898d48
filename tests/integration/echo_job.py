"""A job for tests of the stack: Kafka -> a Python function -> Kafka, as bytes.

    python -m ... echo_job BOOTSTRAP SOURCE SINK CHILD_SECONDS

The function starts a child of its own, as an engine would be, and answers with `value|worker pid|child pid`.
"""

import os
import subprocess
import sys

from pyflink.common import Types, WatermarkStrategy
from pyflink.common.serialization import ByteArraySchema
from pyflink.datastream import MapFunction, StreamExecutionEnvironment
from pyflink.datastream.connectors.kafka import KafkaOffsetsInitializer, KafkaRecordSerializationSchema, KafkaSink, KafkaSource

from operators.lifeline import die_with_parent


class Echo(MapFunction):
    def open(self, context):
        die_with_parent()
        # Ends with its pipe, as operators.child does.
        self.child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)

    def map(self, value):
        return b"%s|%d|%d" % (bytes(value), os.getpid(), self.child.pid)


def main(bootstrap, source, sink):
    env = StreamExecutionEnvironment.get_execution_environment()
    env.enable_checkpointing(1000)
    reader = (KafkaSource.builder().set_bootstrap_servers(bootstrap).set_topics(source).set_group_id("echo")
              .set_starting_offsets(KafkaOffsetsInitializer.earliest()).set_value_only_deserializer(ByteArraySchema()).build())
    writer = (KafkaSink.builder().set_bootstrap_servers(bootstrap).set_record_serializer(
        KafkaRecordSerializationSchema.builder().set_topic(sink).set_value_serialization_schema(ByteArraySchema()).build()).build())
    (env.from_source(reader, WatermarkStrategy.no_watermarks(), "in").map(Echo(), Types.PRIMITIVE_ARRAY(Types.BYTE())).sink_to(writer))
    env.execute("echo")


if __name__ == "__main__":
    main(*sys.argv[1:])
