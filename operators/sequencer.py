"""The sequencer, parallelism 1: it decides what is trained, in which step, and commits each step by a manifest.

Promises (invariants 5 and 6): a row enters step k only if k - 1 - its oldest version <= max_lag; a step's micro-batches count only with
their manifest; rows in a manifest are spent; at most pipeline_depth steps lie ready behind the one in training. To form a step early costs
no lag, since the lag counts from the step: it spares the trainer the wait. Opening fences whoever wrote
before and adopts every manifest and outcome in the log: the log decides, Flink's state holds only rows that wait.
"""

from __future__ import annotations

import collections
import logging
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyflink.common import Types
from pyflink.datastream.functions import KeyedProcessFunction, RuntimeContext
from pyflink.datastream.state import MapStateDescriptor

from operators.advantages import advantages
from operators.dead import DeadLetters
from operators.evaluation import is_evaluation
from operators.grouping import Group, Grouper, Row, row_of
from operators.lifeline import die_with_parent
from operators.log import OwnedLog
from operators.packing import micro_batch, pack
from schemas.record import BadRecord, decode, encode, encode_batch, name_of, read
from schemas.records import Admission, Control, Evaluation, Manifest, Outcome, Rollout, Step, now
from schemas.settings import Settings
from schemas.topics import ADMISSIONS, BATCHES, CONTROL, EVALUATIONS, OUTCOMES, ROLLOUTS, STEPS, topic

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Plan:
    """A step to commit: its micro-batches, and the manifest but for their offsets."""

    micro_batches: list[pa.Table]
    manifest: Manifest


@dataclass
class Tally:
    """What the earlier stages did since the last manifest."""

    rewards: list[float] = field(default_factory=list)
    counts: collections.Counter = field(default_factory=collections.Counter)
    tokens: int = 0
    spans: int = 0

    def row(self, row: Row, spans: int) -> None:
        self.counts["rollouts"] += 1
        self.counts["truncated"] += row.truncated
        self.tokens += row.response_length
        self.spans += spans
        self.rewards.append(row.reward)


class Sequencer:
    """Records in; decisions and plans out, which the caller writes and then confirms. Knows neither Kafka nor Flink.

    at: seconds since the epoch, the caller's clock.
    """

    def __init__(self, settings: Settings):
        s = settings
        self.run_id, self.settings = s.run.id, s
        self.grouper = Grouper(s.grouping)
        self.formed = 0  # last step with a manifest
        self.trained = 0  # last step the trainer finished
        self.closed = False  # nothing more is admitted
        self.stopping: str | None = None  # why no further step is formed
        self.ended = False  # the end manifest is in the log
        self.tally = Tally()
        self._low_steps = 0  # in a row, with an effective sample size below the floor
        self._admission_of: dict[str, int] = {}
        self._last_manifest_at: float | None = None

    # -- taking up the log -------------------------------------------------------------------------------------------------

    def adopt(self, admissions: Seq[Admission], outcomes: Seq[Outcome], manifests: Seq[Manifest], steps: Seq[Step], at: float) -> None:
        for a in admissions:
            self.admission(a, at)
        for m in manifests:
            if m.kind == "end":
                self.ended = True
                self.stopping = self.stopping or "the log says so"
                continue
            self.formed = max(self.formed, m.step)
            for sample in m.samples:
                self._spent(sample["group_id"], sample["sample_index"], sample["rollout_id"])
        for o in outcomes:
            if o.outcome != "duplicate":
                self._spent(o.group_id, o.sample_index, o.rollout_id)
            if o.outcome == "end_of_run":
                self.stopping = self.stopping or o.cause or "end of run"
        for s in steps:
            self.step(s)

    def _spent(self, group_id: str, sample_index: int, rollout_id: str | None) -> None:
        admission = self._admission_of.get(group_id)
        if admission is not None:
            self.grouper.spent(admission, sample_index, rollout_id)
            self._forget_finished(group_id)

    def _forget_finished(self, group_id: str) -> None:
        if (admission := self._admission_of.get(group_id)) is not None and admission in self.grouper.finished:
            del self._admission_of[group_id]

    # -- events ------------------------------------------------------------------------------------------------------------

    def admission(self, a: Admission, at: float) -> None:
        if a.kind == "closed":
            self.closed = True
        elif a.admission not in self.grouper.finished:
            self._admission_of[a.group_id] = a.admission
            self.grouper.admit(a, min(at, a.admitted_at.timestamp()))
            if self.stopping:
                self.grouper.end(self.stopping)

    def row(self, table: pa.Table, at: float) -> tuple[str, bool, str | None]:
        """A scored rollout (one row): (its key, whether its bytes must be kept until its decision is written, a dead letter's cause).

        Raises BadRecord if its identity contradicts the ledger."""
        row, outcome, cause = row_of(table)
        known = self._admission_of.get(row.group_id)
        if known is not None and known != row.admission:
            raise BadRecord(f"rollout {row.rollout_id}: group {row.group_id} is admission {known}, the row says {row.admission}")
        kept = self.grouper.add(row, outcome, cause, at)
        if kept and outcome is None and not is_evaluation(row.group_id):
            self.tally.row(row, len(table.column("version_spans")[0]))
        if row.admission in self.grouper.open:
            self._admission_of[row.group_id] = row.admission
        if self.stopping:
            self.grouper.end(self.stopping)
        return row.key, kept, cause if kept and outcome == "dead" else None

    def step(self, s: Step) -> None:
        if s.step <= self.trained:
            return  # a step on record again
        self.trained = s.step
        t = self.settings.training
        if t.ess_floor is None or (ess := dict(s.metrics).get("ess/raw")) is None:
            return
        self._low_steps = self._low_steps + 1 if ess < t.ess_floor else 0
        if self._low_steps >= t.ess_floor_steps:
            self._low_steps = 0
            cause = (f"effective sample size below training.ess_floor = {t.ess_floor:g} for {t.ess_floor_steps} steps, {ess:.3f} in step "
                     f"{s.step}: the samples are too far from the policy")
            log.warning(f"sequencer: {cause}")
            if t.ess_floor_action == "drop":
                log.warning(f"sequencer: {self.grouper.buffered} buffered samples are dropped")
                self.grouper.drop_buffered(cause)

    def stop(self, cause: str) -> None:
        if not self.stopping:
            self.stopping = cause
            self.grouper.end(cause)

    def tick(self, at: float) -> None:
        self.grouper.tick(at)

    # -- steps -------------------------------------------------------------------------------------------------------------

    def plan(self, at: float) -> Plan | None:
        """The next step if it can be formed now. The caller commits it and then calls `committed`."""
        if self.ended:
            return None
        limit = self.settings.run.max_steps
        if limit is not None and self.formed >= limit:
            self.stop(f"max_steps {limit}")
        if not self.stopping and self.formed - self.trained <= self.settings.packing.pipeline_depth:
            step = self.formed + 1
            self.grouper.drop_stale(step, self.settings.training.max_lag)
            ready = self.grouper.ready
            complete = self.grouper.nothing_missing
            last = self.closed and complete
            if self._enough(last) or (complete and self._credit_is_stuck()):
                return self._form(step, at)
            if last and ready and self.settings.packing.last_step == "train":
                return self._form(step, at)
            if last:
                self.stop("the prompts are at their end")
        if self.stopping:
            return Plan([], self._manifest("end", self.formed, [], [], at))
        return None

    def _enough(self, last: bool) -> bool:
        """A step's samples are ready; in conventional mode also: those of all steps of the round, unless it has begun or is the last."""
        ready = self.grouper.ready.values()
        size, batch = sum(g.size for g in ready), self.settings.training.batch
        if self.settings.run.mode == "pipeline" or last:
            return size >= batch
        return size >= (batch if self._in_round() else self.settings.credit)

    def _in_round(self) -> bool:
        """Conventional mode: the round has begun, since the samples that are left are older than the newest step."""
        return any(g.policy_version_min < self.formed for g in self.grouper.ready.values())

    def _credit_is_stuck(self) -> bool:
        """Nothing more will come before a step is trained: prompts with group sizes of their own can fill the credit with less than a step,
        a round can end with less. Then the step is what there is."""
        if self.settings.run.mode == "conventional" and self._in_round():
            return True
        sizes = [g.size for g in self.grouper.ready.values()]
        return bool(sizes) and self.formed == self.trained and sum(sizes) + max(sizes) > self.settings.credit

    def _form(self, step: int, at: float) -> Plan:
        chosen, size = [], 0
        for g in sorted(self.grouper.ready.values(), key=lambda g: (g.policy_version_min, g.admission)):
            if size >= self.settings.training.batch:
                break
            chosen.append(g)
            size += g.size
        rows = [(g, r, a) for g in chosen for r, a in self._advantages(g)]
        p = self.settings.packing
        if p.dynamic_batching:
            parts = pack([r.length for _, r, _ in rows], p.token_budget)
        else:
            parts = [list(range(i, min(i + p.micro_batch_size, len(rows)))) for i in range(0, len(rows), p.micro_batch_size)]
        micro_batches = [micro_batch(step, i, [rows[j][1:] for j in part]) for i, part in enumerate(parts)]
        return Plan(micro_batches, self._manifest("step", step, chosen, micro_batches, at))

    def _advantages(self, group: Group) -> list[tuple[Row, float]]:
        rows = [group.rows[i] for i in sorted(group.rows)]
        values = advantages([r.reward for r in rows], self.settings.grouping.normalize_by_std)
        return list(zip(rows, (float(v) for v in values), strict=True))

    def _manifest(self, kind: str, step: int, groups: list[Group], micro_batches: list[pa.Table], at: float) -> Manifest:
        rows = [r for g in groups for r in g.rows.values()]
        return Manifest(
            run_id=self.run_id, kind=kind, step=step, micro_batch_offsets=[], sequences=len(rows), groups=len(groups),
            trainable_tokens=sum(pc.sum(pc.cast(pc.list_flatten(m.column("loss_mask")), pa.int64())).as_py() for m in micro_batches),
            tokens=sum(r.length for r in rows),
            samples=[{"group_id": r.group_id, "sample_index": r.sample_index, "rollout_id": r.rollout_id} for r in rows],
            lag_max=max((step - 1 - r.policy_version_min for r in rows), default=0),
            metrics=self._metrics(rows, micro_batches, at), formed_at=now())

    def _metrics(self, rows: list[Row], micro_batches: list[pa.Table], at: float) -> list[tuple[str, float]]:
        t, n = self.tally, max(self.tally.counts["rollouts"], 1)
        seconds = at - self._last_manifest_at if self._last_manifest_at is not None else 0.0
        metrics = {
            "rollouts": t.counts["rollouts"],
            "rollout/truncated": t.counts["truncated"] / n, "rollout/length_mean": t.tokens / n, "seq/spans_mean": t.spans / n,
            "generation/tokens": t.tokens, "queue/buffered": self.grouper.buffered, "queue/ready_groups": len(self.grouper.ready),
            "queue/unresolved": self.grouper.unresolved, "queue/steps_ahead": max(0, self.formed - self.trained - 1),
        }
        if seconds > 0:
            metrics["generation/tokens_per_s"] = t.tokens / seconds
        if t.rewards:  # of everything that was graded, filtered groups too: what the policy does, not what the step trains on
            metrics |= {"reward": float(np.mean(t.rewards)), "reward/std": float(np.std(t.rewards))}
        if rows:
            metrics["reward/trained"] = float(np.mean([r.reward for r in rows]))
            metrics["packing/fill"] = sum(r.length for r in rows) / (len(micro_batches) * self.settings.packing.token_budget)
            metrics["packing/micro_batches"] = len(micro_batches)
        metrics |= {f"outcome/{k}": v for k, v in t.counts.items() if k not in ("rollouts", "truncated")}
        return [(k, float(v)) for k, v in metrics.items()]

    def committed(self, plan: Plan, at: float) -> list[str]:
        """The plan is in the log. Returns the keys of the rows it spends."""
        if plan.manifest.kind == "end":
            self.ended = True
            return []
        self.formed = plan.manifest.step
        self._last_manifest_at, self.tally = at, Tally()
        for sample in plan.manifest.samples:
            self._spent(sample["group_id"], sample["sample_index"], sample["rollout_id"])
        return [f"{s['group_id']}#{s['sample_index']}" for s in plan.manifest.samples]

    def take_decisions(self) -> list[Outcome]:
        """Outcomes to write; afterwards the rows they speak of may be forgotten."""
        decisions, self.grouper.decisions = self.grouper.decisions, []
        for d in decisions:
            self.tally.counts[d.outcome] += 1
            self._forget_finished(d.group_id)
        return [Outcome(run_id=self.run_id, group_id=d.group_id, sample_index=d.sample_index, rollout_id=d.rollout_id, outcome=d.outcome,
                        cause=d.cause, decided_at=now()) for d in decisions]


    def take_evaluations(self) -> list[Evaluation]:
        """What to write of held-out groups, together with their samples' outcomes."""
        groups, self.grouper.evaluated = self.grouper.evaluated, []
        return [self._evaluation(g) for g in groups]

    def _evaluation(self, g: Group) -> Evaluation:
        tables = [g.rows[i].table for i in sorted(g.rows)]
        newest = [v for t in tables if (v := t.column("policy_version_max")[0].as_py()) is not None]
        return Evaluation(
            run_id=self.run_id, policy_version=int(g.group_id.rsplit("/", 2)[1]), policy_version_max=max(newest, default=None),
            group_id=g.group_id, prompts=g.round_prompts, rewards=[g.rows[i].reward if i in g.rows else None for i in range(g.size)],
            response_tokens=sum(r.response_length for r in g.rows.values()),
            truncated=sum(r.truncated for r in g.rows.values()), decided_at=now())


class SequencerFunction(KeyedProcessFunction):
    """Scored rollouts, admissions, steps and control in (key 0), nothing else: gates have seen to it; nothing out: what it says it writes
    to its own logs."""

    FLUSH_MS = 50  # decisions are written together; a credit waits no longer than this

    def __init__(self, settings: Settings):
        self.settings = settings

    def open(self, context: RuntimeContext) -> None:
        die_with_parent(silence_s=self.settings.flink.silence_timeout_s)
        self._rows = context.get_map_state(MapStateDescriptor("rows", Types.STRING(), Types.PRIMITIVE_ARRAY(Types.BYTE())))
        self._sequencer: Sequencer | None = None
        self._log: OwnedLog | None = None
        self._timers: set[int] = set()  # registered and not yet due
        metrics = context.get_metrics_group().add_group("pipelinerl")
        metrics.gauge("buffered", lambda: self._sequencer.grouper.buffered if self._sequencer else 0)
        metrics.gauge("unresolved", lambda: self._sequencer.grouper.unresolved if self._sequencer else 0)
        metrics.gauge("formed", lambda: self._sequencer.formed if self._sequencer else 0)

    def process_element(self, value: bytes, ctx: KeyedProcessFunction.Context):
        self._start()
        value, at = bytes(value), time.time()
        try:
            kind = name_of(value)
            if kind == Rollout.record_name:
                table = read(Rollout, value, checked=True)  # reward and reference have read it
                for i in range(table.num_rows):
                    self._row(table.slice(i, 1) if table.num_rows > 1 else table, value if table.num_rows == 1 else None, at)
            elif kind == Admission.record_name:
                for a in decode(Admission, value):
                    self._sequencer.admission(a, at)
            elif kind == Step.record_name:
                for s in decode(Step, value):
                    self._sequencer.step(s)
            else:
                for c in decode(Control, value):
                    if c.kind == "stop":
                        self._sequencer.stop(c.reason or "stop was asked for")
        except BadRecord as e:
            self._dead(str(e), value)
        self._commit()
        self._arm(ctx)
        return ()

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext):
        self._start()
        self._sequencer.tick(time.time())
        self._commit()
        self._write_decisions()
        self._arm(ctx)
        return ()

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def _start(self) -> None:
        if self._sequencer is not None:
            return
        s, run, at = self.settings, self.settings.run.id, time.time()
        self._dead = DeadLetters(s.kafka, run, "sequencer", topic(run, ROLLOUTS))
        self._log = OwnedLog(s.kafka, f"{run}.sequencer")
        sequencer = Sequencer(s)
        sequencer.adopt(*(list(self._log.rows(cls, topic(run, name))) for cls, name in (
            (Admission, ADMISSIONS), (Outcome, OUTCOMES), (Manifest, BATCHES), (Step, STEPS))), at)
        for c in self._log.rows(Control, topic(run, CONTROL)):
            if c.kind == "stop":
                sequencer.stop(c.reason or "stop was asked for")
        self._sequencer = sequencer
        for key, value in list(self._rows.items()):
            _, kept, _ = sequencer.row(read(Rollout, bytes(value)), at)
            if not kept:
                self._rows.remove(key)

    def _row(self, table: pa.Table, value: bytes | None, at: float) -> None:
        key, kept, dead = self._sequencer.row(table, at)
        value = value or encode_batch(table)
        if dead is not None:
            group_id, index = key.rsplit("#", 1)
            self._dead(dead, value, group_id, int(index))
        if kept:
            self._rows.put(key, value)

    def _commit(self) -> None:
        """Form and commit steps while there is one. Micro-batches, manifest and the decisions made so far are one transaction."""
        while (plan := self._sequencer.plan(time.time())) is not None:
            run = self.settings.run.id
            outcomes, decisions = self._decisions()
            with self._log.transaction() as write:
                for name, _, value in decisions:
                    write(name, value)
                futures = [write(topic(run, BATCHES), encode_batch(m)) for m in plan.micro_batches]
                write.flush()
                plan.manifest.micro_batch_offsets = [f.value.offset for f in futures]
                write(topic(run, BATCHES), encode([plan.manifest]))
            self._forget(outcomes)
            for key in self._sequencer.committed(plan, time.time()):
                self._rows.remove(key)

    def _write_decisions(self) -> None:
        outcomes, decisions = self._decisions()
        if decisions:
            self._log.append(decisions)
            self._forget(outcomes)

    def _decisions(self) -> tuple[list[Outcome], list[tuple[str, None, bytes]]]:
        """The outcomes decided since the last call, and (topic, no key, message) of them and of the evaluations they end."""
        run, outcomes, evaluations = self.settings.run.id, self._sequencer.take_decisions(), self._sequencer.take_evaluations()
        said = ((OUTCOMES, outcomes), (EVALUATIONS, evaluations))
        return outcomes, [(topic(run, name), None, encode(rows)) for name, rows in said if rows]

    def _forget(self, outcomes: list[Outcome]) -> None:
        for o in outcomes:
            if o.outcome != "duplicate":
                self._rows.remove(f"{o.group_id}#{o.sample_index}")

    def _arm(self, ctx) -> None:
        """Decisions are written soon; deadlines are looked at every second. The far timer survives a restore that loses the near one
        (registered in the bundle that the checkpoint flushed)."""
        now_ms = ctx.timer_service().current_processing_time()
        wanted = {(now_ms // 1000 + 2) * 1000}
        if self._sequencer.grouper.decisions:
            wanted.add((now_ms // self.FLUSH_MS + 1) * self.FLUSH_MS)
        for at in wanted - self._timers:  # each costs a message to the JVM
            ctx.timer_service().register_processing_time_timer(at)
        self._timers = {at for at in self._timers | wanted if at > now_ms}
