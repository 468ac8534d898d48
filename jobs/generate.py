"""The generate job: outcomes give credit, admission lets prompts in, engines turn them into rollouts.

    outcomes + control -> admission (1) -> by slot -> generation (engines) -> rollouts
"""

from __future__ import annotations

if __package__ in (None, ""):  # run as a file: `flink run -py jobs/generate.py`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from pyflink.common import Types
from pyflink.datastream import StreamExecutionEnvironment

from jobs.streams import gated, keyed, keyed_bytes, run_job, sink
from operators.admission import AdmissionFunction
from operators.generation import generation
from schemas.records import Control, Outcome
from schemas.settings import Settings
from schemas.topics import CONTROL, OUTCOMES, ROLLOUTS


def build(env: StreamExecutionEnvironment, settings: Settings) -> None:
    env.enable_checkpointing(int(settings.flink.checkpoint_interval_s * 1000))
    dispatched = (
        gated(env, settings, "admission", OUTCOMES, Outcome).union(gated(env, settings, "admission", CONTROL, Control))
        .key_by(lambda _: 0, Types.INT())
        .process(AdmissionFunction(settings), output_type=Types.ROW([Types.INT(), Types.PRIMITIVE_ARRAY(Types.BYTE())]))
        .name("admission").uid("admission")
    )
    rollouts = (
        keyed(dispatched)
        .process(generation(settings), output_type=keyed_bytes())
        .name("generation").uid("generation").set_parallelism(settings.generation.engines)
    )
    sink(rollouts, settings, ROLLOUTS)


if __name__ == "__main__":
    run_job("generate", build)
