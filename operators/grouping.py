"""Grouping: completes groups of n, gives every admitted sample that is not trained its outcome.

Promises (invariant 1): one final outcome a sample. The first complete rollout of (group_id, sample_index) wins, whatever its attempt;
later ones are duplicates. What cannot be trained leaves its group, and the advantages are taken over what remains.
Knows no clock but the one it is given, neither Kafka nor Flink.
"""

from __future__ import annotations

import collections
import itertools
import math
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from operators.evaluation import is_evaluation
from operators.ranges import Ranges
from schemas.records import Admission
from schemas.settings import GroupingSettings

REMEMBERED_GROUPS = 4096  # resolved groups whose winners are remembered, to tell a duplicate from a replay of the winner


@dataclass(slots=True)
class Row:
    """A rollout as the sequencer holds it. `table` is its one-row table of the rollout schema."""

    group_id: str
    sample_index: int
    rollout_id: str
    admission: int
    group_size: int
    length: int
    response_length: int
    reward: float
    policy_version_min: int
    truncated: bool
    table: pa.Table

    @property
    def key(self) -> str:
        return f"{self.group_id}#{self.sample_index}"


@dataclass(frozen=True, slots=True)
class Decision:
    """A final outcome (or a duplicate) that is to be written."""

    group_id: str
    sample_index: int
    rollout_id: str | None
    outcome: str
    cause: str | None = None


@dataclass(slots=True)
class Group:
    group_id: str
    admission: int
    size: int
    admitted_at: float
    first_arrival: float | None = None
    rows: dict[int, Row] = field(default_factory=dict)
    resolved: dict[int, str | None] = field(default_factory=dict)  # sample -> rollout that got the outcome
    round_prompts: int | None = None  # of an evaluation, once its admission was heard

    @property
    def missing(self) -> list[int]:
        return [i for i in range(self.size) if i not in self.rows and i not in self.resolved]

    @property
    def policy_version_min(self) -> int:
        return min(r.policy_version_min for r in self.rows.values())


def row_of(table: pa.Table) -> tuple[Row, str | None, str | None]:
    """(row, outcome, cause): outcome is None if the rollout can be trained, else what becomes of it and why."""
    one = {n: table.column(n)[0].as_py() for n in (
        "group_id", "sample_index", "rollout_id", "admission", "group_size", "prompt_length", "finish_reason", "finish_cause",
        "reward", "reward_status", "policy_version_min", "truncated")}
    tokens = pc.list_value_length(table.column("token_ids"))[0].as_py()
    row = Row(one["group_id"], one["sample_index"], one["rollout_id"], one["admission"], one["group_size"], tokens,
              tokens - one["prompt_length"], math.nan if one["reward"] is None else one["reward"], one["policy_version_min"],
              one["truncated"], table)
    reason, cause = one["finish_reason"], one["finish_cause"]
    if reason == "abort":
        return row, "aborted", cause
    if reason not in ("stop", "length"):
        return row, "dead", f"{reason}: {cause}"
    if one["reward_status"] != "ok" or one["reward"] is None:
        return row, "dead", f"reward {one['reward_status']}: a failed grader is not a reward of 0"
    if not math.isfinite(one["reward"]):
        return row, "dead", f"reward {one['reward']}"
    if not 0 <= one["sample_index"] < one["group_size"]:
        return row, "dead", f"sample_index {one['sample_index']} in a group of {one['group_size']}"
    if not is_evaluation(row.group_id) and (bad := _bad_tokens(table, tokens, one["prompt_length"])):
        return row, "dead", bad
    return row, None, None


def _bad_tokens(table: pa.Table, tokens: int, prompt_length: int) -> str | None:
    mask, logprobs, spans = (table.column(n).combine_chunks() for n in ("loss_mask", "rollout_logprobs", "version_spans"))
    lengths = {"loss_mask": len(mask.values), "rollout_logprobs": len(logprobs.values)}
    reference = table.column("ref_logprobs").combine_chunks()
    if reference.null_count == 0:
        lengths["ref_logprobs"] = len(reference.values)
    if wrong := {n: v for n, v in lengths.items() if v != tokens}:
        return f"per-token lists of another length than token_ids ({tokens}): {wrong}"
    trained = pc.and_kleene(mask.values, pc.is_valid(logprobs.values))
    if not pc.any(trained).as_py():
        return "no trainable token"
    lists = {"rollout_logprobs": logprobs.values} | ({} if reference.null_count else {"ref_logprobs": reference.values})
    for name, values in lists.items():
        values = values.filter(trained).drop_null().to_numpy(zero_copy_only=False)
        if not np.isfinite(values).all():
            return f"{name} has {int((~np.isfinite(values)).sum())} values that are no finite number"
    starts = [s["start"] for s in spans[0].as_py()]
    if not starts or starts[0] != prompt_length or any(a >= b for a, b in itertools.pairwise(starts)) or starts[-1] >= tokens:
        return f"version_spans start at {starts}, expected strictly increasing from {prompt_length} and below {tokens}"
    return None


class Grouper:
    """Groups from admission to readiness. Decisions collect in `decisions` until the caller has written them."""

    def __init__(self, settings: GroupingSettings):
        self.settings = settings
        self.open: dict[int, Group] = {}  # by admission index; ready ones too, until they are spent
        self.ready: dict[int, Group] = {}
        self.decisions: list[Decision] = []
        self.evaluated: list[Group] = []  # held-out groups with all their rows, until the caller has written of them
        self.finished = Ranges()  # admission indices whose samples are all resolved
        self._winners: collections.OrderedDict[int, dict[int, str | None]] = collections.OrderedDict()

    @property
    def buffered(self) -> int:
        return sum(len(g.rows) for g in self.open.values())

    @property
    def unresolved(self) -> int:
        return sum(g.size - len(g.resolved) for g in self.open.values())

    def admit(self, a: Admission, at: float) -> None:
        group = self._group(a.admission, a.group_id, a.samples, at)
        if group is not None and a.kind == "evaluation":
            group.round_prompts = a.round_prompts
            self._settle(group)

    def _group(self, admission: int, group_id: str, size: int, at: float) -> Group | None:
        if admission in self.finished:
            return None
        if admission not in self.open:
            self.open[admission] = Group(group_id, admission, size, at)
        return self.open[admission]

    def spent(self, admission: int, sample_index: int, rollout_id: str | None) -> None:
        """A sample got its final outcome (or its place in a manifest)."""
        group = self.open.get(admission)
        if group is None or sample_index in group.resolved:
            return
        group.rows.pop(sample_index, None)
        group.resolved[sample_index] = rollout_id
        if len(group.resolved) == group.size:
            self.finished.add(admission)
            del self.open[admission]
            self.ready.pop(admission, None)
            self._winners[admission] = group.resolved
            if len(self._winners) > REMEMBERED_GROUPS:
                self._winners.popitem(last=False)

    def decide(self, group: Group, sample_index: int, outcome: str, cause: str | None = None, rollout_id: str | None = None) -> None:
        row = group.rows.get(sample_index)
        rollout_id = rollout_id or (row.rollout_id if row else None)
        self.decisions.append(Decision(group.group_id, sample_index, rollout_id, outcome, cause))
        self.spent(group.admission, sample_index, rollout_id)

    def add(self, row: Row, outcome: str | None, cause: str | None, at: float) -> bool:
        """A rollout arrived. False if its sample has one already; otherwise its bytes must be kept until it is spent or decided."""
        group = self._group(row.admission, row.group_id, row.group_size, at)
        if group is None or row.sample_index in group.resolved or row.sample_index in group.rows:
            self._duplicate(row, group)
            return False
        if group.first_arrival is None:
            group.first_arrival = at
        if outcome is None and row.truncated and self.settings.truncated == "filter" and not is_evaluation(row.group_id):
            outcome, cause = "filtered", "it was cut off at max_tokens (grouping.truncated = filter)"
        if outcome is not None:
            self.decide(group, row.sample_index, outcome, cause, row.rollout_id)
        else:
            group.rows[row.sample_index] = row
        self._settle(group)
        return True

    def _duplicate(self, row: Row, group: Group | None) -> None:
        winners = self._winners.get(row.admission, {}) if group is None else (
            group.resolved | {i: r.rollout_id for i, r in group.rows.items()})
        winner = winners.get(row.sample_index, row.rollout_id)
        if winner != row.rollout_id:  # the same rollout again is a replay of the log, not a second rollout
            cause = f"rollout {winner} came first" if winner else "the sample's outcome was decided before it came"
            self.decisions.append(Decision(row.group_id, row.sample_index, row.rollout_id, "duplicate", cause))

    def _settle(self, group: Group) -> None:
        """A group with nothing missing becomes ready, or is filtered; one of held-out prompts is evaluated."""
        if group.missing:
            return
        if is_evaluation(group.group_id):
            if group.round_prompts is not None:
                self.evaluated.append(replace(group, rows=dict(group.rows)))
                for i in list(group.rows):
                    self.decide(group, i, "evaluated")
            return
        if not group.rows:
            return
        if cause := self.teaches_nothing(group):
            for i in list(group.rows):
                self.decide(group, i, "filtered", cause)
            return
        self.ready[group.admission] = group

    def teaches_nothing(self, group: Group) -> str | None:
        """Why the remaining rows of a group have no advantage; None if they have."""
        rewards = [r.reward for r in group.rows.values()]
        if self.settings.zero_variance == "train":
            return None
        if len(rewards) == 1 < group.size:
            return "one sample left of its group: nothing to compare it with"
        if len(rewards) > 1 and max(rewards) == min(rewards):
            return "all rewards of the group are equal"
        return None

    def drop_stale(self, step: int, max_lag: int) -> None:
        """Rows that are too old for this step are too old for every later one."""
        for group in list(self.ready.values()):
            old = [r for r in group.rows.values() if step - 1 - r.policy_version_min > max_lag]
            for r in old:
                self.decide(group, r.sample_index, "stale", f"lag {step - 1 - r.policy_version_min} in step {step}, max_lag {max_lag}")
            if old and group.admission in self.open:
                del self.ready[group.admission]
                self._settle(group)

    def drop_buffered(self, cause: str) -> None:
        """Every row that waits becomes stale; what of its group is still to come makes a smaller group."""
        for group in [g for g in self.open.values() if not is_evaluation(g.group_id)]:
            for i in list(group.rows):
                self.decide(group, i, "stale", cause)

    def tick(self, at: float) -> None:
        """Deadlines: a group does not wait for ever for its last samples (case 27)."""
        s = self.settings
        for group in list(self.open.values()):
            if not group.missing:
                continue
            waited = at - group.first_arrival if group.first_arrival is not None else 0.0
            total = at - group.admitted_at
            if waited <= s.timeout_s and total <= s.sample_timeout_s:
                continue
            cause = (f"{waited:.0f} s after the group's first rollout (grouping.timeout_s)" if waited > s.timeout_s
                     else f"{total:.0f} s after its admission (grouping.sample_timeout_s)")
            for i in group.missing:
                self.decide(group, i, "late", cause)
            if s.partial == "drop" and not is_evaluation(group.group_id):
                for i in list(group.rows):
                    self.decide(group, i, "late", "its group missed samples at the deadline (grouping.partial = drop)")
            else:
                self._settle(group)

    def end(self, cause: str) -> None:
        """The run is over: whatever is unresolved gets its outcome."""
        for group in list(self.open.values()):
            for i in range(group.size):
                if i not in group.resolved:
                    self.decide(group, i, "end_of_run", cause)

    @property
    def nothing_missing(self) -> bool:
        return all(not g.missing for g in self.open.values())
