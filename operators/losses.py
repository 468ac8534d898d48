"""The losses: pure functions over the trainable tokens of a micro-batch.

Promises: a loss is a plain sum over tokens (GSPO: over sequences), so that a step's gradient is the sum over its global batch
whatever the number of ranks, micro-batches or rows; measures are sums too, to be reduced over ranks before anything is divided.

K: trainable tokens of the micro-batch; S: its sequences. new: log pi [K], with gradient. behaviour: log mu [K], what the sampling
policy said. reference: log pi_ref [K]. All at the row's temperature. The importance weight is w = exp(new - behaviour).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch

from schemas.settings import CISPOLoss, GSPOLoss, PPOLoss, ReinforceLoss

LOG_RATIO_LIMIT = 20.0  # exp of a larger difference of log-probabilities says nothing more and overflows sums
KL_WEIGHT_CLIP = 5.0  # truncation of the KL term's weight for losses that have no truncation of their own


@dataclasses.dataclass(slots=True)
class Tokens:
    """What a loss may look at."""

    new: torch.Tensor  # [K] float32, with gradient
    behaviour: torch.Tensor  # [K] float32
    advantage: torch.Tensor  # [K] float32, of the token's sequence
    sequence: torch.Tensor  # [K] int64, which sequence
    sequences: int  # S
    reference: torch.Tensor | None = None  # [K] float32; NaN where there is none
    entropy: torch.Tensor | None = None  # [K] float32, with gradient if it is in the loss
    on_policy: torch.Tensor | None = None  # [K] bool: of a sequence sampled by the very version that trains
    position: torch.Tensor | None = None  # [K] int64, in the response, from 0
    lag: torch.Tensor | None = None  # [K] int64, in steps


class Terms(NamedTuple):
    """What a policy loss gives: its sum, and what became of the weights."""

    loss: torch.Tensor  # scalar
    clipped: torch.Tensor  # [K] the weights after the clip, without gradient
    beyond: torch.Tensor  # [K] bool: the clip changed something


def log_ratio(t: Tokens) -> torch.Tensor:
    """log w = new - behaviour [K], clamped."""
    return (t.new - t.behaviour).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def reinforce(t: Tokens, p: ReinforceLoss) -> Terms:
    """`-sum min(c, w) A log pi`, the weight without gradient: PipelineRL, eq. 5; c = `importance_weight_clip`."""
    w = log_ratio(t).detach().exp()
    clipped = w.clamp(max=p.importance_weight_clip)
    return Terms(-(clipped * t.advantage * t.new).sum(), clipped, w > p.importance_weight_clip)


def ppo(t: Tokens, p: PPOLoss) -> Terms:
    """`-sum min(w A, clip(w, 1 - low, 1 + high) A)`: Schulman et al. 2017, eq. 7; the two bounds apart as in DAPO, eq. 8."""
    w = log_ratio(t).exp()
    clipped = w.clamp(1 - p.clip_low, 1 + p.clip_high)
    gain, bounded = w * t.advantage, clipped * t.advantage
    return Terms(-torch.minimum(gain, bounded).sum(), clipped.detach(), bounded < gain)


def gspo(t: Tokens, p: GSPOLoss) -> Terms:
    """`-sum over sequences of min(s A, clip(s, 1 - low, 1 + high) A)`, `s = exp(mean over the sequence's tokens of log w)`:
    Zheng et al. 2025, eq. 5 and 7. The gradient goes through s. A sequence is one term, whatever its length."""
    lengths = t.new.new_zeros(t.sequences).index_add(0, t.sequence, torch.ones_like(t.new))
    mean = torch.zeros_like(lengths).index_add(0, t.sequence, log_ratio(t)) / lengths.clamp(min=1)
    advantage = torch.zeros_like(lengths).index_copy(0, t.sequence, t.advantage)  # equal within a sequence
    s = mean.exp()
    clipped = s.clamp(1 - p.clip_low, 1 + p.clip_high)
    gain, bounded = s * advantage, clipped * advantage  # of a sequence without trainable tokens: 0
    return Terms(-torch.minimum(gain, bounded).sum(), clipped.detach()[t.sequence], (bounded < gain)[t.sequence])


def cispo(t: Tokens, p: CISPOLoss) -> Terms:
    """`-sum clip(w, 1 - low, 1 + high) A log pi`, the weight without gradient: MiniMax-M1, eq. 4 and 5."""
    w = log_ratio(t).detach().exp()
    clipped = w.clamp(1 - p.clip_low, 1 + p.clip_high)
    return Terms(-(clipped * t.advantage * t.new).sum(), clipped, clipped != w)


LOSSES: dict[str, Callable[..., Terms]] = {"reinforce": reinforce, "ppo": ppo, "gspo": gspo, "cispo": cispo}

#: First response positions of the intervals that lag and weight are measured over: [0], [1, 2], [3, 6], ...; the last one holds all beyond.
POSITIONS = tuple(2**i - 1 for i in range(16))
#: Sums over trainable tokens, in the order of the vector `step_loss` returns; the last one is a maximum.
MEASURES = (
    "tokens", "loss", "w", "w2", "clipped", "clipped2", "beyond", "kl_behaviour",
    "ref_tokens", "kl_ref", "on_policy", "mismatch_kl", "mismatch_abs", "entropy",
    *(f"{name}_at_{p}" for name in ("tokens", "lag", "w", "w2") for p in POSITIONS), "w_max",
)


def step_loss(t: Tokens, params: ReinforceLoss | PPOLoss | GSPOLoss | CISPOLoss, *, kl_coef: float = 0.0, kl_weighted: bool = True,
              entropy_coef: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """(the loss's sum, with gradient; the measures [len(MEASURES)] in float64, without).

    `policy loss + kl_coef * sum u KL3 - entropy_coef * sum H`, where `KL3 = exp(d) - d - 1`, `d = reference - new`, is the k3
    estimator (Schulman 2020) of KL(pi || pi_ref) for samples from pi; they come from mu, hence u = the truncated importance
    weight, or 1 without `kl_weighted`.
    """
    terms = LOSSES[params.kind](t, params)
    loss = terms.loss
    ratio = log_ratio(t).detach()
    w = ratio.exp()
    zero = w.new_zeros((), dtype=torch.float64)

    ref_tokens = kl_ref = zero
    if t.reference is not None:
        has = ~t.reference.isnan()
        d = (torch.where(has, t.reference, t.new.detach()) - t.new).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        kl = d.exp() - d - 1
        if kl_weighted:
            limit = params.importance_weight_clip if isinstance(params, ReinforceLoss) else KL_WEIGHT_CLIP
            kl = kl * w.clamp(max=limit)
        kl_sum = torch.where(has, kl, 0.0).sum()
        if kl_coef:
            loss = loss + kl_coef * kl_sum
        ref_tokens, kl_ref = has.sum(), kl_sum.detach()
    entropy = zero
    if t.entropy is not None:
        if entropy_coef:
            loss = loss - entropy_coef * t.entropy.sum()
        entropy = t.entropy.detach().sum()
    on_policy = mismatch_kl = mismatch_abs = zero
    if t.on_policy is not None:
        on_policy = t.on_policy.sum()
        mismatch_kl = torch.where(t.on_policy, w - ratio - 1, 0.0).sum()
        mismatch_abs = torch.where(t.on_policy, ratio.abs(), 0.0).sum()

    clipped = terms.clipped
    by_position = w.new_zeros(4, len(POSITIONS), dtype=torch.float64)
    if t.position is not None:
        interval = ((t.position + 1).log2().long()).clamp(max=len(POSITIONS) - 1)
        of_token = torch.stack([torch.ones_like(w), t.lag.to(w.dtype), w, w * w]).to(torch.float64)
        by_position = by_position.index_add(1, interval, of_token)
    sums = torch.stack([m.to(torch.float64) for m in (
        zero + w.numel(), loss.detach(), w.sum(), (w * w).sum(), clipped.sum(), (clipped * clipped).sum(),
        terms.beyond.sum(),
        (w * ratio - w + 1).sum(),  # KL(pi || mu) from samples of mu: E[w log w], with w - 1, whose mean is 0, taken off
        ref_tokens, kl_ref, on_policy, mismatch_kl, mismatch_abs, entropy)])
    largest = (w.max() if w.numel() else zero).to(torch.float64)
    return loss, torch.cat([sums, by_position.flatten(), largest[None]])


def ess(w: float, w2: float, n: float) -> float:
    """Effective sample size as a share of n: `(sum w)^2 / (n sum w^2)`. Weights [2, 1] -> 0.9; [1, 0, 0, 0] -> 0.25."""
    return w * w / (n * w2) if n and w2 else 0.0


def summary(sums: dict[str, float], denominator: float) -> dict[str, float]:
    """The measures by MLflow name, from sums over the whole global batch. What was not measured is left out."""
    n = max(sums["tokens"], 1.0)
    out = {
        "loss": sums["loss"] / denominator,
        "ess/raw": ess(sums["w"], sums["w2"], n), "ess/clipped": ess(sums["clipped"], sums["clipped2"], n),
        "is_ratio/mean": sums["w"] / n, "is_ratio/max": sums["w_max"], "is_ratio/clipped_frac": sums["beyond"] / n,
        "kl/behaviour": sums["kl_behaviour"] / n, "entropy": sums["entropy"] / n,
    }
    if sums["ref_tokens"]:
        out["kl/ref"] = sums["kl_ref"] / sums["ref_tokens"]
    if sums["on_policy"]:
        out |= {"mismatch/kl": sums["mismatch_kl"] / sums["on_policy"], "mismatch/abs_mean": sums["mismatch_abs"] / sums["on_policy"]}
    for p in POSITIONS:
        if n_at := sums[f"tokens_at_{p}"]:
            w, w2 = sums[f"w_at_{p}"], sums[f"w2_at_{p}"]
            out |= {f"lag/at_{p}": sums[f"lag_at_{p}"] / n_at, f"is_ratio/at_{p}": w / n_at, f"ess/at_{p}": ess(w, w2, n_at)}
    return out
