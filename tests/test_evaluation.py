import dataclasses

import pytest

from jobs.cli import main
from jobs.prompts import held_out_options, prompts_of
from operators.admission import Admitter
from operators.evaluation import Curve, Rounds, held_out, is_evaluation
from operators.grouping import Grouper, row_of
from operators.sequencer import Sequencer
from schemas.records import Evaluation, now
from schemas.settings import BadSettings, EvaluationSettings, GroupingSettings, load
from tests.records import admission, outcome, prompt, rollout, table

PROMPTS = [(10 + i, prompt(i)) for i in range(5)]


def admitter(**evaluation) -> Admitter:
    return Admitter("r", batch=8, max_lag=1, group_size=4, evaluation=EvaluationSettings(**{"every": 10, "samples": 2, "credit": 4} | evaluation))


def entries(a: Admitter) -> list:
    found = []
    while (entry := a.evaluate()) is not None:
        found.append(entry[0])
    return found


def resolved(a, *, what="evaluated"):
    return [dataclasses.replace(outcome(0, i, what), group_id=a.group_id) for i in range(a.samples)]


def test_a_round_has_a_credit_of_its_own():
    a = admitter()
    a.rounds.begin(0, PROMPTS)
    first = entries(a)
    assert [(e.kind, e.group_id, e.samples, e.prompt_offset, e.round_prompts) for e in first] == [
        ("evaluation", f"evaluation:d/0/{i}", 2, 10 + i, 5) for i in range(2)]
    assert a.credit == 16, "training's is untouched"
    assert a.admit(prompt(0), 0).admission == 2, "the same prompt may be trained on; indices are one sequence"
    for o in resolved(first[0]):
        a.resolve(o)
    assert [e.group_id for e in entries(a)] == ["evaluation:d/0/2"] and a.credit == 12


def test_a_round_that_was_under_way_is_gone_on_with_after_a_restart():
    a = admitter()
    a.rounds.begin(20, PROMPTS)
    ledger = entries(a)
    again = admitter()
    left = again.adopt([*ledger, admission(9)], resolved(ledger[0]))
    assert [x.group_id for x in left] == ["evaluation:d/20/1", "d/0/9"] and again.rounds.version == 20
    assert again.next_offset == 10, "held-out offsets are of another topic"
    again.rounds.left.extend(PROMPTS)
    assert [e.group_id for e in entries(again)] == ["evaluation:d/20/2"], "credit for one; what was admitted is not admitted again"
    assert again.credit == 12 and not again.rounds.due(29)


def test_rounds_do_not_overlap_and_none_is_made_up_for():
    rounds = Rounds(10)
    assert rounds.due(3)
    rounds.begin(3, PROMPTS)
    assert not rounds.due(35)
    rounds.left.clear()
    assert rounds.due(35)
    rounds.begin(35, PROMPTS)
    rounds.left.clear()
    assert [v for v in (36, 39, 40) if rounds.due(v)] == [40]
    assert not Rounds(None).due(0)


def test_nothing_is_evaluated_once_the_run_is_stopping():
    a = admitter()
    a.rounds.begin(0, PROMPTS)
    a.stopping = True
    assert a.evaluate() is None


def test_a_data_set_cannot_pass_for_a_held_out_one():
    assert "does not begin with 'evaluation:'" in admitter().refusal(prompt(0, dataset="evaluation:d"))


def test_a_held_out_prompt_is_a_group_of_its_round():
    p = held_out(prompt(7), 30, 2)
    assert (p.group_id, p.group_size) == ("evaluation:d/30/7", 2) and is_evaluation(p.group_id) and not is_evaluation(prompt(7).group_id)


# --- sequencer


def row(sample: int, group: int = 0, reward: float | None = 1.0, size: int = 2, **changes):
    n = 8
    return rollout(group, sample, size=size, reward=reward, group_id=f"evaluation:d/30/{group}", loss_mask=[False] * n,
                   rollout_logprobs=[None] * n, version=31, **changes)


def ledger(group: int = 0, samples: int = 2):
    return admission(group, samples, kind="evaluation", group_id=f"evaluation:d/30/{group}", round_prompts=3)


@pytest.mark.parametrize("heard_first", [True, False])
def test_a_held_out_group_is_evaluated_and_never_trained_on(heard_first):
    s = Sequencer(load(flags={"run.id": "r", "training.batch": 8, "grouping.group_size": 4}))
    if heard_first:
        s.admission(ledger(), 0.0)
    for i, reward in enumerate((1.0, 0.0)):
        assert s.row(table(row(i, reward=reward, truncated=bool(i))), 0.0)[1]
    if not heard_first:
        assert not s.take_decisions(), "the round's size is in the admission"
        s.admission(ledger(), 0.0)
    assert [(o.group_id, o.sample_index, o.outcome) for o in s.take_decisions()] == [("evaluation:d/30/0", i, "evaluated") for i in range(2)]
    (e,) = s.take_evaluations()
    assert (e.policy_version, e.policy_version_max, e.prompts, e.rewards, e.response_tokens, e.truncated) == (30, 31, 3, [1.0, 0.0], 10, 1)
    assert not s.take_evaluations() and not s.grouper.ready and s.plan(0.0) is None
    assert s.tally.rewards == [], "the reward of training is of what is trained on"


@pytest.mark.parametrize(("late", "rewards"), [(False, [1.0, None]), (True, [1.0, None])])
def test_what_is_dead_or_late_counts_as_wrong(late, rewards):
    g = Grouper(GroupingSettings(timeout_s=10))
    g.admit(ledger(), 0.0)
    g.add(*row_of(table(row(0))), 0.0)
    if late:
        g.tick(11.0)
    else:
        g.add(*row_of(table(row(1, reward=None, reward_status="timeout"))), 0.0)
    (group,) = g.evaluated
    assert [group.rows[i].reward if i in group.rows else None for i in range(2)] == rewards
    assert sorted(d.outcome for d in g.decisions) == sorted(["evaluated", "late" if late else "dead"])


def test_a_group_of_which_nothing_came_is_evaluated_too():
    g = Grouper(GroupingSettings())
    g.admit(ledger(), 0.0)
    for i in range(2):
        g.add(*row_of(table(row(i, finish_reason="context_overflow"))), 0.0)
    (group,) = g.evaluated
    assert not group.rows and group.size == 2


def test_the_guard_of_the_sample_size_leaves_evaluations_alone():
    g = Grouper(GroupingSettings())
    g.admit(ledger(), 0.0)
    g.add(*row_of(table(row(0))), 0.0)
    g.drop_buffered("too far")
    assert not g.decisions


# --- figures


def record(ordinal: int, *rewards, version: int = 30) -> Evaluation:
    return Evaluation(run_id="r", policy_version=version, group_id=f"evaluation:d/{version}/{ordinal}", prompts=3, rewards=list(rewards),
                      response_tokens=1, truncated=0, decided_at=now())


def test_a_round_is_told_when_its_last_prompt_is_there_and_once():
    curve = Curve(1.0)
    assert curve.feed([record(0, 1.0, 0.0), record(1, None, 0.0), record(0, 1.0, 0.0), record(0, 1.0, version=40)]) == []
    assert curve.feed([record(2, 1.0, 1.0)]) == [30]
    m = curve.metrics(30)
    assert (m["eval/reward"], m["eval/pass_at_1"], m["eval/pass_at_2"], m["eval/ungraded"]) == (0.5, 0.5, pytest.approx(2 / 3), 1.0)
    assert curve.feed([record(2, 1.0, 1.0)]) == [] and list(curve.rounds) == [30]


def test_held_out_problems_are_few_and_others_than_those_of_training():
    options = held_out_options("demo", None, 3)
    found = list(prompts_of("demo", size=options["size"], seed=options["seed"], limit=options["limit"]))
    assert len(found) == 64 and found[0].dataset != next(prompts_of("demo", seed=3)).dataset
    assert held_out_options("test.jsonl", 20, 3) == {"size": None, "seed": 0, "limit": 20}


def test_held_out_prompts_without_rounds_are_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match=r"--held-out SOURCE does nothing without --evaluation\.every"):
        main(["run", "--model.path", str(tmp_path), "--held-out", "demo"])
    with pytest.raises(SystemExit, match="is loaded with --prompts"):
        main(["run", "--model.path", str(tmp_path), "--held-out", "demo", "--evaluation.every", "5"])


@pytest.mark.parametrize(("flags", "message"), [
    ({"evaluation.samples": 4}, "do nothing without evaluation.every"), ({"evaluation.every": 5, "evaluation.greedy": "true", "evaluation.samples": 2}, "one is enough"),
    ({"evaluation.every": 5, "evaluation.samples": 9}, r"evaluation.credit \(8\) must hold")])
def test_settings_that_contradict_are_refused(flags, message):
    with pytest.raises(BadSettings, match=message):
        load(flags=flags)
