import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.advantages import advantages
from operators.losses import MEASURES, Tokens, ess, step_loss, summary
from schemas.settings import CISPOLoss, GSPOLoss, PPOLoss, ReinforceLoss

LOSSES = [ReinforceLoss(), ReinforceLoss(importance_weight_clip=0.8), PPOLoss(kind="ppo"),
          GSPOLoss(kind="gspo", clip_low=0.1, clip_high=0.1), CISPOLoss(kind="cispo", clip_low=0.3, clip_high=0.3)]
any_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda p: f"{p.kind}-{getattr(p, 'importance_weight_clip', '')}")
few = settings(max_examples=25, deadline=None)
batches = st.tuples(st.integers(0, 2**32 - 1), st.lists(st.integers(1, 6), min_size=1, max_size=7))


def rows(seed: int, lengths: list[int]):
    """(new, behaviour, reference, advantage, entropy) a sequence, float64."""
    r = np.random.default_rng(seed)

    def values(n):
        return torch.from_numpy(r.normal(-1.5, 0.5, n))

    return [(values(n), values(n), values(n), float(r.normal()), values(n).abs()) for n in lengths]


def run(sequences, loss, **options):
    """(loss, gradient of each sequence's new log-probabilities, measures by name) of one micro-batch."""
    new = torch.cat([s[0] for s in sequences]).requires_grad_()
    index = torch.repeat_interleave(torch.arange(len(sequences)), torch.tensor([len(s[0]) for s in sequences]))
    entropy = torch.cat([s[4] for s in sequences])
    tokens = Tokens(new, torch.cat([s[1] for s in sequences]), torch.tensor([s[3] for s in sequences], dtype=torch.float64)[index], index,
                    len(sequences), torch.cat([s[2] for s in sequences]), entropy + 0.1 * new, torch.ones_like(index, dtype=torch.bool))
    value, measures = step_loss(tokens, loss, **({"kl_coef": 0.1, "entropy_coef": 0.01} | options))
    value.backward()
    return value.item(), list(new.grad.split([len(s[0]) for s in sequences])), dict(zip(MEASURES, measures.tolist(), strict=True))


@pytest.mark.parametrize(("rewards", "expected"), [
    ([1, 0, 0, 0], [1, -1 / 3, -1 / 3, -1 / 3]), ([2.5], [2.5]), ([], []), ([0.7, 0.7, 0.7], [0, 0, 0]), ([1, 0], [1, -1])])
def test_leave_one_out_advantages(rewards, expected):
    assert advantages(rewards) == pytest.approx(expected, abs=1e-15)


def test_equal_rewards_give_exactly_zero():
    assert advantages([0.1] * 7) == [0.0] * 7


def test_advantages_divided_by_the_sample_deviation():
    deviation = np.std([1, 0, 0, 0], ddof=1)
    assert advantages([1, 0, 0, 0], normalize_by_std=True) == pytest.approx([x / (deviation + 1e-4) for x in (1, -1 / 3, -1 / 3, -1 / 3)])
    assert advantages([2.5], normalize_by_std=True) == [2.5]


def test_a_missing_reward_is_refused():
    with pytest.raises(ValueError, match="finite"):
        advantages([1.0, float("nan")])


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=8))
@few
def test_advantages_sum_to_zero_and_follow_a_permutation(rewards):
    a = advantages(rewards)
    assert math.fsum(a) == pytest.approx(0, abs=1e-9)
    assert advantages(rewards[::-1]) == pytest.approx(a[::-1])


@pytest.mark.parametrize(("w", "expected"), [([2, 1], 0.9), ([1, 0, 0, 0], 0.25), ([3, 3, 3], 1.0)])
def test_effective_sample_size(w, expected):
    assert ess(sum(w), sum(x * x for x in w), len(w)) == pytest.approx(expected)


def one_sequence(log_ratios, advantage=1.0):
    behaviour = torch.full((len(log_ratios),), -2.0, dtype=torch.float64)
    return (behaviour + torch.tensor(log_ratios, dtype=torch.float64), behaviour, behaviour, advantage, behaviour.abs())


def test_reinforce_by_hand():
    value, (gradient,), m = run([one_sequence([math.log(2), math.log(10)], 3.0)], ReinforceLoss(), kl_coef=0, entropy_coef=0)
    # weights 2 and min(5, 10) = 5, advantage 3
    assert value == pytest.approx(-(2 * 3 * (-2 + math.log(2)) + 5 * 3 * (-2 + math.log(10))))
    assert gradient.tolist() == pytest.approx([-6, -15])
    assert (m["beyond"], m["w"], m["clipped"], m["w_max"]) == pytest.approx((1, 12, 7, 10))


@pytest.mark.parametrize(("ratio", "advantage", "slope"), [(1.1, 1, -1.1), (1.5, 1, 0), (0.5, 1, -0.5), (0.5, -1, 0), (1.5, -1, 1.5)])
def test_ppo_clips_only_what_would_gain(ratio, advantage, slope):
    _, (gradient,), m = run([one_sequence([math.log(ratio)], advantage)], PPOLoss(kind="ppo"), kl_coef=0, entropy_coef=0)
    assert gradient.item() == pytest.approx(slope)
    assert m["beyond"] == (slope == 0)


def test_gspo_ratio_is_the_exponential_of_the_mean_log_ratio():
    value, (gradient,), _ = run([one_sequence([0.1, 0.3], 2.0)], GSPOLoss(kind="gspo", clip_high=10), kl_coef=0, entropy_coef=0)
    assert value == pytest.approx(-2 * math.exp(0.2))
    assert gradient.tolist() == pytest.approx([-math.exp(0.2)] * 2)  # ratio x advantage / length


def test_cispo_clips_on_both_sides_and_keeps_the_gradient():
    loss = CISPOLoss(kind="cispo", clip_low=0.5, clip_high=1.0)
    _, (gradient,), m = run([one_sequence([math.log(x) for x in (0.1, 1.5, 9)])], loss, kl_coef=0, entropy_coef=0)
    assert gradient.tolist() == pytest.approx([-0.5, -1.5, -2.0])
    assert m["beyond"] == 2


def test_k3_term_by_hand_weighted_and_not():
    new, ref = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.5], dtype=torch.float64)
    sequence = (new, new - math.log(8), ref, 0.0, new.abs())  # weight 8, truncated to 5
    kl = math.exp(-0.5) + 0.5 - 1
    slope = 1 - math.exp(-0.5)
    for weighted, factor in ((True, 5), (False, 1)):
        value, (gradient,), m = run([sequence], ReinforceLoss(), kl_coef=0.1, kl_weighted=weighted, entropy_coef=0)
        assert value == pytest.approx(0.1 * factor * kl)
        assert gradient.item() == pytest.approx(0.1 * factor * slope)
        assert m["kl_ref"] == pytest.approx(factor * kl)


def test_a_token_without_a_reference_has_no_kl():
    sequence = list(one_sequence([0.1, 0.2], 0.0))
    sequence[2] = torch.tensor([float("nan"), -3.0], dtype=torch.float64)
    value, (gradient,), m = run([tuple(sequence)], ReinforceLoss(), entropy_coef=0)
    assert m["ref_tokens"] == 1 and math.isfinite(value)
    assert gradient[0] == 0 and gradient[1] != 0


@any_loss
def test_unchanged_weights_have_ratio_one(loss):
    _, _, m = run([one_sequence([0.0] * 4), one_sequence([0.0] * 2, -1.0)], loss)
    s = summary(m, 2)
    expected = 1 if getattr(loss, "importance_weight_clip", 1) >= 1 else 0.8
    assert (s["ess/raw"], s["ess/clipped"], s["is_ratio/mean"], s["is_ratio/max"]) == pytest.approx((1, 1, 1, 1))
    assert m["clipped"] == pytest.approx(6 * expected)
    assert (s["kl/behaviour"], s["mismatch/kl"], s["mismatch/abs_mean"]) == pytest.approx((0, 0, 0))


@pytest.mark.parametrize("loss", [ReinforceLoss(importance_weight_clip=math.inf), PPOLoss(kind="ppo"), CISPOLoss(kind="cispo")],
                         ids=lambda p: p.kind)
def test_at_ratio_one_the_gradient_is_the_plain_policy_gradient(loss):
    _, gradients, _ = run([one_sequence([0.0] * 3, 2.0), one_sequence([0.0] * 2, -1.0)], loss, kl_coef=0, entropy_coef=0)
    assert torch.cat(gradients).tolist() == pytest.approx([-2.0] * 3 + [1.0] * 2)


@any_loss
@given(batches, st.integers(1, 5))
@few
def test_micro_batches_add_up_to_the_batch(loss, batch, parts):
    sequences = rows(*batch)
    value, gradients, measures = run(sequences, loss)
    pieces = [p for p in (sequences[i::parts] for i in range(parts)) if p]
    split = [run(p, loss) for p in pieces]
    assert sum(s[0] for s in split) == pytest.approx(value)
    by_place = {j: g for i, s in enumerate(split) for j, g in zip(range(i, len(sequences), parts), s[1], strict=True)}
    for i, gradient in enumerate(gradients):
        torch.testing.assert_close(by_place[i], gradient)
    for name in MEASURES[:-1]:
        assert sum(s[2][name] for s in split) == pytest.approx(measures[name])
    assert max(s[2]["w_max"] for s in split) == measures["w_max"]


@any_loss
@given(batches, st.randoms())
@few
def test_the_order_of_sequences_does_not_matter(loss, batch, random):
    sequences = rows(*batch)
    order = list(range(len(sequences)))
    random.shuffle(order)
    value, gradients, _ = run(sequences, loss)
    other, moved, _ = run([sequences[i] for i in order], loss)
    assert other == pytest.approx(value)
    for place, i in enumerate(order):
        torch.testing.assert_close(moved[place], gradients[i])


def test_huge_log_ratios_stay_finite():
    value, (gradient,), m = run([one_sequence([200.0, -200.0])], ReinforceLoss())
    assert math.isfinite(value) and gradient.isfinite().all() and all(math.isfinite(x) for x in m.values())


def test_lag_and_weight_by_position():
    new, n = torch.zeros(6, dtype=torch.float64), 6
    behaviour = -torch.tensor([0.5, 0.0, 0.0, 1.0, 0.0, 0.0], dtype=torch.float64)  # log w = 0.5 at position 0, 1.0 at position 5
    _, measures = step_loss(Tokens(new, behaviour, torch.ones(n), torch.zeros(n, dtype=torch.int64), 1,
                                   position=torch.tensor([0, 1, 2, 5, 2**15 - 1, 2**20]), lag=torch.tensor([3, 2, 1, 1, 0, 7])), ReinforceLoss())
    s = summary(dict(zip(MEASURES, measures.tolist(), strict=True)), 1)
    assert {k: v for k, v in s.items() if k.startswith("lag/at")} == {"lag/at_0": 3, "lag/at_1": 1.5, "lag/at_3": 1, "lag/at_32767": 3.5}
    assert (s["is_ratio/at_0"], s["is_ratio/at_1"], s["is_ratio/at_3"]) == pytest.approx((math.exp(0.5), 1, math.e))
    assert s["ess/at_1"] == pytest.approx(1)


def test_what_was_not_measured_is_left_out():
    sums = dict.fromkeys(MEASURES, 0.0) | {"tokens": 2.0, "w": 2.0, "w2": 2.0}
    assert not {"kl/ref", "mismatch/kl", "mismatch/abs_mean"} & summary(sums, 1).keys()
