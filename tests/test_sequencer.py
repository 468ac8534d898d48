import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from operators.sequencer import Sequencer
from schemas.record import BadRecord
from schemas.records import Manifest, Step, now
from schemas.settings import load
from tests.records import admission, rollout, table


def sequencer(**flags) -> Sequencer:
    return Sequencer(load(flags={"run.id": "r", "training.batch": 8, "grouping.group_size": 4, "training.max_lag": 2} | flags))


def step(k: int, **metrics: float) -> Step:
    return Step(run_id="r", epoch=0, step=k, version_in=k - 1, version_out=k, weights_digest="", metrics=list(metrics.items()), finished_at=now())


class Log:
    """What the Flink function does with a sequencer, against lists."""

    def __init__(self, s: Sequencer):
        self.s, self.outcomes, self.manifests, self.batches = s, [], [], []

    def admit(self, *groups: int, samples: int = 4) -> None:
        for g in groups:
            self.s.admission(admission(g, samples), 0.0)

    def group(self, g: int, version: int = 0, rewards=(1.0, 0.0, 0.0, 0.0)) -> None:
        for i, r in enumerate(rewards):
            self.s.row(table(rollout(g, i, size=len(rewards), version=version, reward=r)), 0.0)

    def commit(self) -> list[Manifest]:
        made = []
        while (plan := self.s.plan(0.0)) is not None:
            self.outcomes += self.s.take_decisions()
            self.s.committed(plan, 0.0)
            self.manifests.append(plan.manifest)
            self.batches.append(plan.micro_batches)
            made.append(plan.manifest)
        self.outcomes += self.s.take_decisions()
        return made

    def restarted(self, **flags) -> "Log":
        """Another incarnation: the log, but none of the memory."""
        fresh = Log(sequencer(**flags))
        fresh.s.adopt([admission(g) for g in range(20)], self.outcomes, self.manifests, [], 0.0)
        fresh.outcomes, fresh.manifests = list(self.outcomes), list(self.manifests)
        return fresh


def test_a_step_is_whole_groups_and_leaves_the_rest():
    log = Log(sequencer())
    for g in range(3):
        log.group(g)
    (m,) = log.commit()
    assert (m.kind, m.step, m.sequences, m.groups, m.tokens, m.trainable_tokens) == ("step", 1, 8, 2, 64, 40)
    assert {s["group_id"] for s in m.samples} == {"d/0/0", "d/0/1"}
    assert log.s.grouper.buffered == 4


def test_no_further_ahead_than_pipeline_depth():
    log = Log(sequencer(**{"packing.pipeline_depth": 2, "training.max_lag": 3}))
    for g in range(10):
        log.group(g)
    assert [m.step for m in log.commit()] == [1, 2, 3], "one in training, two behind it"
    log.s.step(step(1))
    assert [m.step for m in log.commit()] == [4]


def low(k: int) -> Step:
    return step(k, **{"ess/raw": 0.1})


GUARD = {"training.ess_floor": 0.3, "training.ess_floor_steps": 2}


def test_a_low_effective_sample_size_is_warned_of(caplog):
    log = Log(sequencer(**GUARD))
    log.group(0)
    for s in (low(1), low(1), step(2, **{"ess/raw": 0.9}), low(3)):
        log.s.step(s)
    assert not caplog.records, "not twice in a row: a step said again counts once"
    log.s.step(low(4))
    assert "below training.ess_floor = 0.3 for 2 steps, 0.100 in step 4" in caplog.text
    assert log.s.grouper.buffered == 4


def test_the_guard_drops_what_is_buffered_if_told_so(caplog):
    log = Log(sequencer(**GUARD, **{"training.ess_floor_action": "drop"}))
    log.admit(0, 1)
    log.group(0)
    for i in range(2):
        log.s.row(table(rollout(1, i, size=4, reward=float(i))), 0.0)
    log.s.step(low(1)), log.s.step(low(2))
    log.commit()
    assert {(o.group_id, o.outcome) for o in log.outcomes} == {("d/0/0", "stale"), ("d/0/1", "stale")} and len(log.outcomes) == 6
    assert "6 buffered samples are dropped" in caplog.text
    for i in (2, 3):
        log.s.row(table(rollout(1, i, size=4, version=2, reward=float(i == 2))), 0.0)
    log.group(2, version=2)
    (m,) = log.commit()
    assert m.step == 1 and m.sequences == 6, "what came later of the group makes a smaller one"


CONVENTIONAL = {"run.mode": "conventional", "training.max_lag": 1}  # rounds of G = 2 steps of 8


def test_conventional_steps_wait_for_the_whole_round():
    log = Log(sequencer(**CONVENTIONAL))
    log.admit(*range(4))
    for g in range(3):
        log.group(g)
    assert not log.commit(), "a step's samples are there, but generation goes on"
    log.group(3)
    assert [m.step for m in log.commit()] == [1, 2]
    assert [m.lag_max for m in log.manifests] == [0, 1]
    log.s.step(step(1)), log.s.step(step(2))
    for g in range(4, 7):
        log.group(g, version=2)
    assert not log.commit(), "the next round is not whole"
    log.group(7, version=2)
    assert [m.step for m in log.commit()] == [3, 4]


def test_a_conventional_round_ends_with_what_is_left():
    """Prompts with group sizes of their own: nothing more is admitted while a round is in training, so that nothing can be waited for."""
    log = Log(sequencer(**CONVENTIONAL))
    for g, size in enumerate((6, 6, 4)):
        log.admit(g, samples=size)
        log.group(g, rewards=(1.0,) + (0.0,) * (size - 1))
    assert [m.sequences for m in log.commit()] == [12, 4]
    log = Log(sequencer(**CONVENTIONAL))
    log.admit(0, samples=12)
    log.group(0, rewards=(1.0,) + (0.0,) * 11)
    assert [m.sequences for m in log.commit()] == [12], "another group of 12 would not fit into the credit of 16"


def test_the_end_of_the_prompts_does_not_wait_for_a_whole_round():
    log = Log(sequencer(**CONVENTIONAL))
    log.admit(0, 1)
    log.s.closed = True
    log.group(0)
    assert not log.commit()
    log.group(1)
    assert [(m.kind, m.step) for m in log.commit()] == [("step", 1), ("end", 1)]


def test_lag_is_bounded_and_the_stale_say_so():
    log = Log(sequencer())
    log.group(0, version=0), log.group(1, version=1), log.group(2, version=1)
    log.s.step(step(3))
    log.s.formed = 3
    (m,) = log.commit()  # step 4 is trained by version 3
    assert m.lag_max == 2
    assert [(o.group_id, o.outcome) for o in log.outcomes] == [("d/0/0", "stale")] * 4


def test_the_oldest_groups_go_first():
    log = Log(sequencer())
    log.group(0, version=2), log.group(1, version=1), log.group(2, version=0)
    (m,) = log.commit()
    assert {s["group_id"] for s in m.samples} == {"d/0/1", "d/0/2"}


def test_credit_comes_back_when_everything_is_filtered():
    """Case 23 and invariant 9: five would-be steps without a difference."""
    log = Log(sequencer())
    for g in range(10):
        log.group(g, rewards=(0.0,) * 4)
    assert not log.commit()
    assert [o.outcome for o in log.outcomes] == ["filtered"] * 40
    assert log.s.tally.counts["filtered"] == 40


def test_rows_in_a_manifest_are_spent_after_a_restart():
    log = Log(sequencer())
    for g in range(3):
        log.group(g)
    log.commit()
    again = log.restarted()
    for g in range(3):
        log_rows = [again.s.row(table(rollout(g, i, reward=float(i == 0))), 0.0)[1] for i in range(4)]
        assert log_rows == [g == 2] * 4
    assert not again.commit(), "step 1 is there, and the trainer has not trained it"
    again.s.step(step(1))
    again.group(3)
    assert [m.step for m in again.commit()] == [2]
    assert not [o for o in again.outcomes if o.outcome == "duplicate"], "replayed rows are no duplicates"


def test_max_steps_ends_the_run_with_an_outcome_for_everyone():
    """Case 25."""
    log = Log(sequencer(**{"run.max_steps": 1}))
    log.admit(0, 1, 2, 3)
    for g in range(3):
        log.group(g)
    assert [m.kind for m in log.commit()] == ["step", "end"], "nobody waits for the tail"
    assert sorted({(o.group_id, o.outcome) for o in log.outcomes}) == [("d/0/2", "end_of_run"), ("d/0/3", "end_of_run")]


def test_what_arrives_after_the_end_gets_its_outcome_too():
    log = Log(sequencer())
    log.s.stop("asked for")
    log.commit()
    log.admit(5)
    assert [o.outcome for o in log.s.take_decisions()] == ["end_of_run"] * 4
    log.group(6)
    assert {(o.group_id, o.sample_index) for o in log.s.take_decisions() if o.outcome == "end_of_run"} == {("d/0/6", i) for i in range(4)}


@pytest.mark.parametrize(("last_step", "kinds", "left"), [("drop", ["end"], 4), ("train", ["step", "end"], 0)])
def test_the_last_prompts_make_less_than_a_step(last_step, kinds, left):
    """Case 41."""
    log = Log(sequencer(**{"packing.last_step": last_step}))
    log.admit(0)
    log.group(0)
    assert not log.commit()
    log.s.admission(admission(1, kind="closed", samples=0, group_id=""), 0.0)
    made = log.commit()
    if last_step == "train":
        log.s.step(step(1))
        made += log.commit()
    assert [m.kind for m in made] == kinds
    assert [o.outcome for o in log.outcomes] == ["end_of_run"] * left


def test_one_end_manifest_however_often_it_restarts():
    log = Log(sequencer())
    log.s.stop("asked for")
    assert [m.kind for m in log.commit()] == ["end"]
    again = log.restarted()
    assert not again.commit()


def test_group_sizes_of_their_own_cannot_block_the_credit():
    log = Log(sequencer(**{"training.batch": 12, "training.max_lag": 0}))
    log.admit(0, samples=7)  # the next group of 7 does not fit into the credit of 12
    log.group(0, rewards=(1.0,) + (0.0,) * 6)
    (m,) = log.commit()
    assert m.sequences == 7


def test_a_row_that_contradicts_the_ledger_is_refused():
    log = Log(sequencer())
    log.admit(0)
    with pytest.raises(BadRecord, match="admission 0, the row says 9"):
        log.s.row(table(rollout(0, 0, admission=9)), 0.0)


def test_dead_rows_say_why():
    s = sequencer()
    key, kept, cause = s.row(table(rollout(0, 1, finish_reason="context_overflow", finish_cause="600 tokens > 512")), 0.0)
    assert (key, kept) == ("d/0/0#1", True) and "600 tokens" in cause


events = st.lists(st.tuples(st.integers(0, 11), st.integers(0, 3), st.integers(0, 2), st.sampled_from([0.0, 1.0]), st.booleans()), max_size=80)


@given(events, st.integers(0, 80))
@hypothesis_settings(max_examples=60, deadline=None)
def test_every_admitted_sample_has_one_outcome_whatever_comes_and_whenever_it_restarts(rows, crash_at):
    """Invariant 1: rows in any order, twice, stale or not; a restart in the middle loses what was not yet written."""
    log = Log(sequencer(**{"run.max_steps": 4}))
    log.admit(*range(12))
    seen = []
    for n, (g, i, attempt, reward, trained) in enumerate(rows):
        row = table(rollout(g, i, reward=reward, version=min(log.s.trained, attempt), rollout_id=f"{g}.{i}.{attempt}"))
        seen.append(row)
        log.s.row(row, 0.0)
        if n % 7 == 6:
            log.commit()
        if trained and log.s.formed > log.s.trained:
            log.s.step(step(log.s.trained + 1))
        if n == crash_at:
            fresh = Log(sequencer(**{"run.max_steps": 4}))
            fresh.s.adopt([admission(g) for g in range(12)], log.outcomes, log.manifests, [step(k) for k in range(1, log.s.trained + 1)], 0.0)
            fresh.outcomes, fresh.manifests = log.outcomes, log.manifests
            log = fresh
            for old in seen:
                log.s.row(old, 0.0)
    log.commit()
    log.s.stop("end")
    log.commit()
    final = [(o.group_id, o.sample_index) for o in log.outcomes if o.outcome != "duplicate"]
    spent = [(s["group_id"], s["sample_index"]) for m in log.manifests for s in m.samples]
    assert sorted(final + spent) == sorted((f"d/0/{g}", i) for g in range(12) for i in range(4))
    assert all(m.lag_max <= 2 for m in log.manifests)
