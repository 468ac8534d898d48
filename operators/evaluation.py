"""Evaluation: held-out prompts through the engines that serve training, a round of them at set policy versions.

Promises: a held-out sample is admitted, graded and accounted for like any other, and never trained on; it has a credit of its own, so that
it takes none of training's; a round's figures are those of all its prompts, an answer that nobody could grade counting as wrong. A sample
starts under the round's version or a newer one and may, like all, end under a newer one: its group's record says which. Knows neither
Kafka nor Flink.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from schemas.records import Evaluation, Prompt

PREFIX = "evaluation:"  # of the data set's name in a held-out group's id, whose pass is the round's version


def is_evaluation(group_id: str) -> bool:
    """Whether a group is of held-out prompts."""
    return group_id.startswith(PREFIX)


def held_out(prompt: Prompt, version: int, samples: int) -> Prompt:
    """A prompt as a group of a round: its identity is (evaluation:data set, version, ordinal)."""
    return replace(prompt, dataset=PREFIX + prompt.dataset, dataset_pass=version, group_size=samples)


class Rounds:
    """When a round is due, and which of its prompts is next.

    >>> rounds = Rounds(every=10)
    >>> rounds.due(0)
    True
    >>> rounds.begin(0, [(0, "a prompt")])
    >>> rounds.due(25), rounds.left.popleft(), rounds.due(25)
    (False, (0, 'a prompt'), True)
    """

    def __init__(self, every: int | None):
        self.every = every
        self.version: int | None = None  # of the round under way, or the newest one
        self.prompts = 0  # in it
        self.left: collections.deque[tuple[int, Prompt]] = collections.deque()  # (offset, prompt) not yet admitted

    def due(self, version: int) -> bool:
        """Whether a round begins now that `version` is trained: one in each stretch of `every` versions, when the last one is admitted."""
        if self.every is None or self.left:
            return False
        return self.version is None or version // self.every > self.version // self.every

    def begin(self, version: int, prompts: Sequence[tuple[int, Prompt]]) -> None:
        self.version, self.prompts = version, len(prompts)
        self.left.extend(prompts)


# --- figures


def pass_at_k(n: int, c: int, k: int) -> float:
    """The chance that one of k out of n samples, c of them right, is right: 1 - C(n - c, k) / C(n, k) (Chen et al. 2021, eq. 1).

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 4), pass_at_k(4, 0, 2)
    (0.25, 1.0, 0.0)
    """
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


@dataclass(frozen=True)
class Figures:
    """Means over prompts, and their standard errors."""

    prompts: int
    samples: int  # a prompt
    reward: float
    reward_error: float
    pass_at: dict[int, float]  # k -> pass@k
    pass_at_1_error: float
    ungraded: int  # samples without a reward


def figures(rewards: Sequence[Sequence[float | None]], right: float) -> Figures:
    """rewards: of each prompt, of each of its samples; None where there is none. A sample is right with a reward of `right` or more."""
    n = len(rewards[0])
    means = [sum(r or 0.0 for r in of) / n for of in rewards]
    correct = [sum(r is not None and r >= right for r in of) for of in rewards]
    ks = sorted({k for k in (1, 2, 4, 8, 16, 32, 64, 128, 256) if k <= n} | {n})
    passed = {k: sum(pass_at_k(n, c, k) for c in correct) / len(rewards) for k in ks}
    return Figures(len(rewards), n, sum(means) / len(means), _error(means), passed, _error([c / n for c in correct]),
                   sum(r is None for of in rewards for r in of))


def _error(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return math.sqrt(sum((v - mean) ** 2 for v in values) / max(1, len(values) - 1) / len(values))


class Curve:
    """The rounds that are complete, from records of `evaluations`."""

    def __init__(self, right: float):
        self._right = right
        self._groups: dict[int, dict[str, Evaluation]] = collections.defaultdict(dict)  # version -> group -> its record
        self.rounds: dict[int, Figures] = {}

    def feed(self, records: Iterable[Evaluation]) -> list[int]:
        """The versions whose rounds these records complete."""
        done = []
        for e in records:
            groups = self._groups[e.policy_version]
            groups[e.group_id] = e
            if len(groups) >= e.prompts and e.policy_version not in self.rounds:
                self.rounds[e.policy_version] = figures([g.rewards for g in groups.values()], self._right)
                done.append(e.policy_version)
                del self._groups[e.policy_version]
        return done

    def metrics(self, version: int) -> dict[str, float]:
        """A round by MLflow names."""
        f = self.rounds[version]
        return {"eval/reward": f.reward, "eval/reward_error": f.reward_error, "eval/ungraded": float(f.ungraded),
                **{f"eval/pass_at_{k}": p for k, p in f.pass_at.items()}}
