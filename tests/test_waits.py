from datetime import UTC, datetime, timedelta

from operators.waits import SHOWN, Wait, table, waits
from schemas.records import Ack, Manifest, Step, Weights
from schemas.settings import load
from tests.records import admission, outcome, rollout

START = datetime(2026, 1, 1, tzinfo=UTC)
SETTINGS = load(flags={"run.id": "r", "training.batch": 8, "grouping.group_size": 4, "training.max_lag": 1})  # credit 16


def at(seconds: float) -> datetime:
    return START + timedelta(seconds=seconds)


def step(k: int, finished: float) -> Step:
    return Step(run_id="r", epoch=0, step=k, version_in=k - 1 if k else None, version_out=k, weights_digest="", metrics=[], finished_at=at(finished))


def version(v: int, offered: float) -> Weights:
    return Weights(run_id="r", epoch=0, version=v, digest="", uri="", encoding="full", base_version=None, bytes=1, dtype="float32",
                   offered_at=at(offered))


def ack(who: str, v: int, status: str = "applied", cause: str | None = None) -> Ack:
    return Ack(run_id="r", generator_id=who, status=status, epoch=0, version=v, digest="", cause=cause, phases_ms=[], in_flight=0, waiting=0,
               generated_tokens=0, busy_steps=0, in_flight_sum=0, capacity_sum=0, at=START)


def manifest(k: int, formed: float, groups=(), kind: str = "step") -> Manifest:
    samples = [{"group_id": f"d/0/{g}", "sample_index": i, "rollout_id": f"{g}.{i}.0"} for g in groups for i in range(4)]
    return Manifest(run_id="r", kind=kind, step=k, micro_batch_offsets=[], sequences=len(samples), groups=len(groups), trainable_tokens=0,
                    tokens=0, samples=samples, lag_max=0, metrics=[], formed_at=at(formed))


def found(seconds: float, **given) -> list[Wait]:
    nothing = dict.fromkeys(("admissions", "outcomes", "rollouts", "manifests", "steps", "weights", "acks"), ())
    return waits(SETTINGS, at(seconds), **(nothing | given))


def test_before_anything_has_happened():
    assert [(w.owner, w.what) for w in found(5)] == [
        ("admission", "the first prompts, or the generate job"), ("engines", "the trainer's first version")]


def test_an_engine_that_loads_has_a_limit():
    (wait,) = [w for w in found(30, steps=[step(0, 10)], weights=[version(0, 10)]) if w.owner == "engines"]
    assert (wait.age_s, wait.limit_s, wait.setting) == (20, 600, "generation.start_timeout_s")


def test_groups_and_their_stragglers():
    admitted = [admission(g, admitted_at=at(g)) for g in range(4)]
    rollouts = [rollout(0, i, finished_at=at(10 + i)) for i in range(4)] + [rollout(1, i, finished_at=at(20)) for i in (0, 2)]
    waiting = found(50, admissions=admitted, rollouts=rollouts, outcomes=[outcome(1, 3, "dead")], steps=[step(0, 0)], weights=[version(0, 0)],
                    acks=[ack("g0", 0)])
    assert [(w.owner, w.age_s, w.limit_s) for w in waiting] == [
        ("admission", 47, None), ("sequencer", 30, 120), ("sequencer", 48, 1800), ("sequencer", 37, None)]
    assert "15 of 16 samples are unresolved" in waiting[0].what and "samples [1] of group d/0/1" in waiting[1].what
    assert "2 group(s), the oldest d/0/2" in waiting[2].what and "4 samples of complete groups, a step takes 8" in waiting[3].what


def test_a_step_waits_for_the_trainer_from_when_it_could_begin():
    admitted = [admission(g, admitted_at=at(0)) for g in range(4)]
    rollouts = [rollout(g, i, finished_at=at(1)) for g in range(4) for i in range(4)]
    waiting = found(30, admissions=admitted, rollouts=rollouts, steps=[step(0, 0)], weights=[version(0, 0)], acks=[ack("g0", 0)],
                    manifests=[manifest(1, 5, (0, 1)), manifest(2, 6, (2, 3))])
    assert [(w.owner, w.age_s, w.setting) for w in waiting][1:] == [("trainer", 25, "training.stall_timeout_s")]
    assert waiting[1].what == "step 1 to be trained; 2 formed in all", "rows in a manifest wait for the trainer, not for a step"


def test_a_generator_behind_says_what_it_holds_and_refused():
    waiting = found(30, admissions=[admission(0, kind="closed")], steps=[step(k, k) for k in range(4)],
                    weights=[version(k, 10 * k) for k in range(3)],
                    acks=[ack("g0", 0), ack("g1", 0), ack("g1", 2), ack("g0", 1, "failed", "wrong digest")])
    (wait,) = waiting
    assert (wait.owner, wait.age_s) == ("g0", 20), "since the first version it does not hold"
    assert wait.what == "version 2 applied (holds 0); it refused version 1: wrong digest"


def test_nobody_waits_when_the_run_has_ended():
    assert found(30, manifests=[manifest(1, 5), manifest(1, 6, kind="end")], steps=[step(0, 0), step(1, 7)]) == []
    assert table([]) == "waits: none, the run has ended"


def test_the_table_is_bounded():
    said = table([Wait("sequencer", f"group {i}", 1.0, 120.0, "grouping.timeout_s") for i in range(SHOWN + 5)])
    assert len(said.splitlines()) == SHOWN + 2 and said.endswith("... and 5 more")
    assert "1.0 s     120 s  group 0 (grouping.timeout_s)" in said
