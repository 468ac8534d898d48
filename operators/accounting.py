"""Accounting: what became of every admitted sample, told from the topics alone.

Promises (invariant 1): each admitted sample has exactly one final outcome, or is buffered (its rollout is in the log) or in flight. What
does not add up is named, not summed away.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
from dataclasses import dataclass, field

from operators.log import read
from schemas.record import rows_of
from schemas.records import OUTCOMES as FINAL
from schemas.records import Admission, Outcome, Rollout
from schemas.settings import KafkaSettings
from schemas.topics import ADMISSIONS, OUTCOMES, ROLLOUTS, topic


@dataclass
class Accounts:
    """Counts of samples, by what became of them."""

    admitted: int = 0
    outcomes: collections.Counter = field(default_factory=collections.Counter)
    duplicates: int = 0
    buffered: int = 0
    in_flight: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def adds_up(self) -> bool:
        return not self.wrong and self.admitted == sum(self.outcomes.values()) + self.buffered + self.in_flight

    def summary(self) -> dict[str, int]:
        """By the names of the summary: stale_dropped is the outcome stale."""
        named = {("stale_dropped" if o == "stale" else o): self.outcomes[o] for o in FINAL}
        return {"admitted": self.admitted, **named, "buffered": self.buffered, "in_flight": self.in_flight, "duplicates": self.duplicates}


def unresolved(admissions: Iterable[Admission], outcomes: Iterable[Outcome]) -> dict[str, tuple[Admission, set[int]]]:
    """group_id -> (its admission, the samples without a final outcome), of the groups that have such samples, oldest first."""
    groups: dict[str, tuple[Admission, set[int]]] = {}
    for a in admissions:
        if a.kind != "closed":
            groups.setdefault(a.group_id, (a, set(range(a.samples))))
    for o in outcomes:
        if o.outcome != "duplicate" and (group := groups.get(o.group_id)) is not None:
            group[1].discard(o.sample_index)
    return {group_id: group for group_id, group in groups.items() if group[1]}


def account(admissions: Iterable[Admission], outcomes: Iterable[Outcome], rollouts: Iterable[tuple[str, int]]) -> Accounts:
    """`rollouts` are (group_id, sample_index) of the rollouts in the log; only those of unresolved samples matter."""
    accounts = Accounts()
    unresolved: dict[str, set[int]] = {}
    for a in admissions:
        if a.kind != "closed" and a.group_id not in unresolved:
            unresolved[a.group_id] = set(range(a.samples))
            accounts.admitted += a.samples
    final: dict[tuple[str, int], Outcome] = {}
    for o in outcomes:
        if o.outcome == "duplicate":
            accounts.duplicates += 1
            continue
        sample = f"{o.group_id}#{o.sample_index}"
        first = final.get((o.group_id, o.sample_index))
        if first is not None:
            if (first.outcome, first.step, first.rollout_id) != (o.outcome, o.step, o.rollout_id):
                accounts.wrong.append(f"{sample}: {_said(first)} and then {_said(o)}")
            continue
        final[o.group_id, o.sample_index] = o
        if o.sample_index not in unresolved.get(o.group_id, ()):
            accounts.wrong.append(f"{sample}: {_said(o)}, but it was never admitted")
            continue
        unresolved[o.group_id].remove(o.sample_index)
        accounts.outcomes[o.outcome] += 1
    open_samples = {(g, i) for g, left in unresolved.items() for i in left}
    if open_samples:
        accounts.buffered = len(open_samples & set(rollouts))
        accounts.in_flight = len(open_samples) - accounts.buffered
    return accounts


def _said(o: Outcome) -> str:
    return f"{o.outcome}@{o.step}" if o.outcome == "trained" else o.outcome


def account_topics(kafka: KafkaSettings, run_id: str) -> Accounts:
    """The accounts of a run up to this moment. Outcomes are read before admissions, so that none is seen without its admission."""

    def rows(cls: type, name: str):
        return rows_of(cls, (m.value for m in read(kafka, topic(run_id, name))))

    outcomes = list(rows(Outcome, OUTCOMES))
    return account(rows(Admission, ADMISSIONS), outcomes, ((r.group_id, r.sample_index) for r in rows(Rollout, ROLLOUTS)))
