"""The preprocess job: rollouts get their reward and reference log-probabilities, then the sequencer makes steps of them.

    rollouts -> reward -> reference -> scored
                                   \\-> sequencer (1), which also hears admissions, steps and control -> batches, outcomes
"""

from __future__ import annotations

if __package__ in (None, ""):  # run as a file: `flink run -py jobs/preprocess.py`
    import sys
    from pathlib import Path

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from datetime import datetime, timedelta

from pyflink.common import Row, Types
from pyflink.datastream import StreamExecutionEnvironment

from jobs.streams import dealt, gated, keyed_bytes, run_job, sink, source
from operators.accounting import unresolved
from operators.log import read as log_read
from operators.offload import slot_keys
from operators.reward import reward
from operators.sequencer import SequencerFunction
from schemas.record import read, rows_of
from schemas.records import Admission, Control, Outcome, Rollout, Step
from schemas.settings import KafkaSettings, Settings
from schemas.topics import ADMISSIONS, CONTROL, OUTCOMES, ROLLOUTS, SCORED, STEPS, topic

CLOCKS = timedelta(minutes=1)  # by which the clocks of the broker and of whoever admits may differ


def unresolved_since(kafka: KafkaSettings, run_id: str) -> datetime | None:
    """When the oldest group was admitted that has no outcome for some sample: no rollout before that is of use to anybody. None if nothing
    was admitted yet."""
    admissions = list(rows_of(Admission, (m.value for m in log_read(kafka, topic(run_id, ADMISSIONS)))))
    if not admissions:
        return None
    opened = unresolved(admissions, rows_of(Outcome, (m.value for m in log_read(kafka, topic(run_id, OUTCOMES)))))
    return min((a.admitted_at for a, _ in opened.values()), default=admissions[-1].admitted_at) - CLOCKS


def build(env: StreamExecutionEnvironment, settings: Settings) -> None:
    env.enable_checkpointing(int(settings.flink.checkpoint_interval_s * 1000))
    octets = Types.PRIMITIVE_ARRAY(Types.BYTE())
    control = gated(env, settings, "sequencer", CONTROL, Control)
    rollouts = source(env, settings, ROLLOUTS, unresolved_since(settings.kafka, settings.run.id))
    scored = (
        dealt(rollouts, control, slot_keys(max(4, settings.reward.parallelism)), "reward")
        .process(reward(settings), output_type=octets)
        .name("reward").uid("reward").set_parallelism(settings.reward.parallelism)
    )
    if settings.reference.enabled:
        from operators.reference import reference

        scored = (
            dealt(scored, control, slot_keys(max(4, settings.reference.parallelism)), "reference")
            .process(reference(settings), output_type=octets)
            .name("reference").uid("reference").set_parallelism(settings.reference.parallelism)
        )
    sink(scored.map(_with_key, output_type=keyed_bytes()).name("key").uid("key"), settings, SCORED)
    ledgers = [gated(env, settings, "sequencer", name, cls) for name, cls in ((ADMISSIONS, Admission), (STEPS, Step))]
    (
        scored.union(*ledgers, control)
        .key_by(lambda _: 0, Types.INT())
        .process(SequencerFunction(settings), output_type=octets)
        .name("sequencer").uid("sequencer").set_parallelism(1).set_max_parallelism(1)
    )


def _with_key(value: bytes) -> Row:
    return Row(read(Rollout, bytes(value), checked=True).column("group_id")[0].as_py().encode(), value)


if __name__ == "__main__":
    run_job("preprocess", build)
