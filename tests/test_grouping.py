import math

import pytest

from operators.grouping import Grouper, row_of
from schemas.settings import GroupingSettings
from tests.records import admission, rollout, table


def grouper(**settings) -> Grouper:
    return Grouper(GroupingSettings(group_size=4, **settings))


def feed(g: Grouper, *rollouts, at: float = 0.0) -> list[bool]:
    return [g.add(*row_of(table(r)), at) for r in rollouts]


def said(g: Grouper) -> list[tuple[str, int, str]]:
    return [(d.group_id, d.sample_index, d.outcome) for d in g.decisions]


def test_a_complete_group_becomes_ready():
    g = grouper()
    feed(g, *(rollout(0, i, reward=float(i == 0)) for i in range(3)))
    assert not g.ready
    feed(g, rollout(0, 3))
    assert list(g.ready) == [0] and g.buffered == 4 and not g.decisions


def test_equal_rewards_are_filtered_at_once():
    g = grouper()
    feed(g, *(rollout(0, i, reward=1.0) for i in range(4)))
    assert said(g) == [("d/0/0", i, "filtered") for i in range(4)]
    assert not g.ready and not g.open and 0 in g.finished


def test_equal_rewards_are_trained_if_wanted():
    g = grouper(zero_variance="train")
    feed(g, *(rollout(0, i, reward=1.0) for i in range(4)))
    assert list(g.ready) == [0]


def test_an_answer_that_was_cut_off_leaves_its_group_if_wanted():
    g = grouper(truncated="filter")
    feed(g, rollout(0, 0, reward=1.0), rollout(0, 1), rollout(0, 2, finish_reason="length", truncated=True), rollout(0, 3))
    assert said(g) == [("d/0/0", 2, "filtered")] and "max_tokens" in g.decisions[0].cause
    assert sorted(g.ready[0].rows) == [0, 1, 3], "and its reward is not in the mean of the others"
    g = grouper()
    feed(g, *(rollout(0, i, reward=float(i), truncated=True) for i in range(4)))
    assert sorted(g.ready[0].rows) == [0, 1, 2, 3]


def test_a_group_of_which_all_were_cut_off_is_finished():
    g = grouper(truncated="filter")
    feed(g, *(rollout(0, i, reward=float(i), truncated=True) for i in range(4)))
    assert [o for *_, o in said(g)] == ["filtered"] * 4
    assert not g.ready and not g.open


def test_a_second_rollout_of_a_sample_is_a_duplicate_whatever_its_attempt():
    """Case 38: a resubmitted prompt finishes twice with different tokens."""
    g = grouper()
    assert feed(g, rollout(0, 0), rollout(0, 0, rollout_id="again", attempt=1)) == [True, False]
    assert [(d.rollout_id, d.outcome) for d in g.decisions] == [("again", "duplicate")]


def test_a_replay_of_the_winner_is_no_duplicate():
    g = grouper()
    assert feed(g, rollout(0, 0), rollout(0, 0)) == [True, False]
    assert not g.decisions
    feed(g, *(rollout(0, i) for i in range(1, 4)))  # all rewards 0: filtered
    g.decisions.clear()
    feed(g, rollout(0, 0))
    assert not g.decisions, "nor when its group is finished"
    feed(g, rollout(0, 0, rollout_id="again"))
    assert [d.outcome for d in g.decisions] == ["duplicate"]


@pytest.mark.parametrize(("changes", "what", "cause"), [
    ({"finish_reason": "abort", "finish_cause": "older than max_lag"}, "aborted", "older than max_lag"),
    ({"finish_reason": "context_overflow", "finish_cause": "600 tokens"}, "dead", "context_overflow: 600 tokens"),
    ({"reward": None, "reward_status": "timeout"}, "dead", "reward timeout"),
    ({"reward": math.nan}, "dead", "reward nan"),
    ({"rollout_logprobs": [None] * 3 + [-1.0, math.nan, -1.0, -1.0, -1.0]}, "dead", "rollout_logprobs has 1 values"),
    ({"rollout_logprobs": [None] * 3 + [-1.0, -math.inf, -1.0, -1.0, -1.0]}, "dead", "rollout_logprobs has 1 values"),
    ({"ref_logprobs": [None] * 3 + [-1.0, math.nan, -1.0, -1.0, -1.0]}, "dead", "ref_logprobs has 1 values"),
    ({"rollout_logprobs": [None] * 8}, "dead", "no trainable token"),
    ({"loss_mask": [False] * 8}, "dead", "no trainable token"),
    ({"loss_mask": [True] * 7}, "dead", "another length"),
    ({"version_spans": [{"start": 3, "policy_version": 0}, {"start": 3, "policy_version": 1}]}, "dead", "version_spans"),
    ({"version_spans": [{"start": 2, "policy_version": 0}]}, "dead", "version_spans"),
    ({"version_spans": []}, "dead", "version_spans"),
    ({"sample_index": 4}, "dead", "sample_index 4"),
])
def test_what_cannot_be_trained_has_a_cause(changes, what, cause):
    """Case 13 among them: one bad row leaves, its group goes on."""
    _, outcome, why = row_of(table(rollout(0, changes.pop("sample_index", 0), **changes)))
    assert outcome == what
    assert cause in why


def test_a_group_goes_on_without_its_bad_row():
    g = grouper()
    feed(g, rollout(0, 0, reward=1.0), rollout(0, 1), rollout(0, 2, reward=None, reward_status="error"), rollout(0, 3))
    assert said(g) == [("d/0/0", 2, "dead")]
    assert sorted(g.ready[0].rows) == [0, 1, 3]


def test_null_logprobs_of_some_tokens_do_not_condemn_the_row():
    _, outcome, _ = row_of(table(rollout(rollout_logprobs=[None] * 3 + [-1.0, None, -1.0, -1.0, -1.0])))
    assert outcome is None


def test_stale_rows_leave_and_the_rest_is_regrouped():
    g = grouper()
    feed(g, rollout(0, 0, version=0, reward=1.0), *(rollout(0, i, version=2, reward=float(i == 1)) for i in (1, 2, 3)))
    g.drop_stale(step=4, max_lag=2)  # trained by version 3: lag 3 and 1
    assert said(g) == [("d/0/0", 0, "stale")]
    assert sorted(g.ready[0].rows) == [1, 2, 3]
    g.drop_stale(step=5, max_lag=2)
    assert len(g.decisions) == 1, "lag 2 is within the bound"


def test_what_is_left_of_a_stale_group_can_be_worth_nothing():
    g = grouper()
    feed(g, rollout(0, 0, version=0, reward=1.0), *(rollout(0, i, version=2) for i in (1, 2, 3)))
    g.drop_stale(step=4, max_lag=2)
    assert [o for *_, o in said(g)] == ["stale", "filtered", "filtered", "filtered"]


def test_a_straggler_is_late_and_the_seven_are_trained():
    """Case 27."""
    g = grouper(timeout_s=10)
    g.admit(admission(0), at=0.0)
    feed(g, *(rollout(0, i, reward=float(i)) for i in range(3)), at=5.0)
    g.tick(15.0)
    assert not g.decisions
    g.tick(15.1)
    assert said(g) == [("d/0/0", 3, "late")]
    assert sorted(g.ready[0].rows) == [0, 1, 2]
    feed(g, rollout(0, 3, rollout_id="0.3.0"), at=16.0)
    assert [o for *_, o in said(g)] == ["late", "duplicate"], "one final outcome; that it came after all is said"


def test_a_partial_group_is_dropped_if_wanted():
    g = grouper(timeout_s=10, partial="drop")
    feed(g, *(rollout(0, i, reward=float(i)) for i in range(3)))
    g.tick(11.0)
    assert sorted(said(g)) == [("d/0/0", i, "late") for i in range(4)]
    assert not g.open


def test_a_group_that_never_arrives_is_late_too():
    g = grouper(sample_timeout_s=100)
    g.admit(admission(0), at=0.0)
    g.tick(100.0)
    assert not g.decisions
    g.tick(101.0)
    assert said(g) == [("d/0/0", i, "late") for i in range(4)]


def test_one_sample_left_teaches_nothing():
    g = grouper(timeout_s=1)
    feed(g, rollout(0, 0, reward=1.0))
    g.tick(2.0)
    assert sorted(o for *_, o in said(g)) == ["filtered", "late", "late", "late"]


def test_the_end_gives_everyone_an_outcome():
    """Case 41."""
    g = grouper()
    g.admit(admission(1), at=0.0)
    feed(g, rollout(0, 0))
    g.end("the prompts are at their end")
    assert sorted(said(g)) == [(f"d/0/{k}", i, "end_of_run") for k in (0, 1) for i in range(4)]
    assert not g.open
