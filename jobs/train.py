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

from collections.abc import Iterator
from functools import partial

import pyarrow as pa
from pyflink.common import Row, Types
from pyflink.datastream import StreamExecutionEnvironment

from jobs.streams import Gate, run_job, source, through
from operators.tracking import RunListener
from operators.training import RankFunction
from schemas.records import Control, Manifest, Sequence
from schemas.settings import Settings
from schemas.topics import BATCHES, CONTROL


class Route(Gate):
    """Message to Row(rank, message) for each rank that needs it."""

    def passed(self, value: bytes, cls: type, rows: pa.Table) -> Iterator[Row]:
        ranks = range(self.settings.training.ranks)
        if cls is Sequence:
            yield Row(rows.column("micro_batch")[0].as_py() % len(ranks), value)
        elif cls is Manifest or rows.column("kind")[0].as_py() == "start":
            for rank in ranks:
                yield Row(rank, value)


def build(env: StreamExecutionEnvironment, settings: Settings) -> None:
    octets = Types.PRIMITIVE_ARRAY(Types.BYTE())
    batches, control = (through(source(env, settings, name), Route(settings, "training", name, *records), Types.ROW([Types.INT(), octets]))
                        for name, records in ((BATCHES, (Sequence, Manifest)), (CONTROL, (Control,))))
    ranked = batches.union(control).partition_custom(lambda key, _: key, lambda row: row[0])
    trained = ranked.process(RankFunction(settings, partial(RunListener, settings)), output_type=octets)
    trained.name("training").uid("training").set_parallelism(settings.training.ranks)


if __name__ == "__main__":
    run_job("train", build)
