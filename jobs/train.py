"""The train job: one DeepSpeed rank a subtask; steps come as micro-batches with a manifest.

    batches + control -> micro-batch i to rank i mod R, manifests and the start to all ranks -> training (ranks) -> weights, steps, outcomes

It takes no Flink checkpoints: the trainer's own checkpoint is the only cursor. After a failure it reads the batches again and skips
the steps that are in the checkpoint.
"""

from __future__ import annotations

if __package__ in (None, ""):  # run as a file: `flink run -py jobs/train.py`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from functools import partial

from pyflink.common import Row, Types
from pyflink.datastream import StreamExecutionEnvironment
from pyflink.datastream.functions import FlatMapFunction

from jobs.streams import run_job, source
from operators.dead import DeadLetters
from operators.tracking import RunListener
from operators.training import RankFunction
from schemas.record import BadRecord, decode, name_of, read
from schemas.records import Control, Manifest, Sequence
from schemas.settings import Settings
from schemas.topics import BATCHES, CONTROL, topic


class Route(FlatMapFunction):
    """Message to Row(rank, message) for each rank that needs it."""

    def __init__(self, settings: Settings):
        self.settings = settings

    def open(self, context) -> None:
        s = self.settings
        self._dead = DeadLetters(s.kafka, s.run.id, "training", topic(s.run.id, BATCHES))

    def flat_map(self, value: bytes):
        value, ranks = bytes(value), range(self.settings.training.ranks)
        try:
            kind = name_of(value)
            if kind == Sequence.record_name:
                yield Row(read(Sequence, value).column("micro_batch")[0].as_py() % len(ranks), value)
            elif kind == Manifest.record_name or (kind == Control.record_name and decode(Control, value)[0].kind == "start"):
                for rank in ranks:
                    yield Row(rank, value)
            elif kind != Control.record_name:
                raise BadRecord(f"expected a micro-batch, a manifest or a control record, found {kind!r}")
        except BadRecord as e:
            self._dead(str(e), value)


def build(env: StreamExecutionEnvironment, settings: Settings) -> None:
    octets = Types.PRIMITIVE_ARRAY(Types.BYTE())
    routed = source(env, settings, BATCHES, CONTROL).flat_map(Route(settings), output_type=Types.ROW([Types.INT(), octets])).name("route")
    ranked = routed.partition_custom(lambda key, _: key, lambda row: row[0])
    trained = ranked.process(RankFunction(settings, partial(RunListener, settings)), output_type=octets)
    trained.name("training").uid("training").set_parallelism(settings.training.ranks)


if __name__ == "__main__":
    run_job("train", build)
