"""Leave-one-out advantages of a group. Imports nothing heavier than numpy: the sequencer uses it in a Flink worker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STD_EPSILON = 1e-4


def advantages(rewards: Sequence[float], normalize_by_std: bool = False) -> list[float]:
    """Each reward minus the mean of the group's others: `A_i = r_i - (sum(r) - r_i) / (n - 1)`, RLOO (Ahmadian et al. 2024, eq. 8).

    A group of one has no others: `A = r`. With `normalize_by_std` they are divided by the group's sample standard deviation
    (n - 1 in its denominator) + 1e-4; a group of one has none and is left alone.

    >>> advantages([1.0, 0.0, 0.0, 0.0])
    [1.0, -0.3333333333333333, -0.3333333333333333, -0.3333333333333333]
    """
    r = np.asarray(rewards, np.float64)
    if not np.isfinite(r).all():
        raise ValueError(f"rewards of a group must be finite numbers, not {list(rewards)}: an ungraded rollout has no advantage")
    n = len(r)
    if n <= 1:
        return r.tolist()
    # The sum of the others is formed pairwise: taking r_i from a sum loses it where rewards differ much in size, and equal
    # rewards must give exactly 0.
    a = (r[:, None] - r[None, :]).sum(axis=1) / (n - 1)
    if normalize_by_std:
        a = a / (r.std(ddof=1) + STD_EPSILON)
    return a.tolist()
