"""A set of integers kept as ranges: what grows densely from 0 costs nothing to remember."""

from __future__ import annotations

import bisect


class Ranges:
    """Add and ask; memory grows with the number of gaps, not of members.

    >>> r = Ranges(); r.add(0); r.add(2); r.add(1)
    >>> len(r), 2 in r, 3 in r, r.gaps
    (3, True, False, 0)
    """

    def __init__(self):
        self._starts: list[int] = []
        self._ends: list[int] = []  # exclusive

    def add(self, n: int) -> None:
        i = bisect.bisect_right(self._starts, n)
        if i and n < self._ends[i - 1]:
            return
        joins_left = i > 0 and self._ends[i - 1] == n
        joins_right = i < len(self._starts) and self._starts[i] == n + 1
        if joins_left and joins_right:
            self._ends[i - 1] = self._ends.pop(i)
            self._starts.pop(i)
        elif joins_left:
            self._ends[i - 1] = n + 1
        elif joins_right:
            self._starts[i] = n
        else:
            self._starts.insert(i, n)
            self._ends.insert(i, n + 1)

    def __contains__(self, n: int) -> bool:
        i = bisect.bisect_right(self._starts, n)
        return i > 0 and n < self._ends[i - 1]

    def __len__(self) -> int:
        return sum(self._ends) - sum(self._starts)

    @property
    def gaps(self) -> int:
        return max(0, len(self._starts) - 1)
