"""Admission: lets groups of prompts in as credit allows.

Promises (invariants 1 and 5): at most (max_lag + 1) * B samples to train on are unresolved at once; groups are admitted whole; each
prompt is admitted once, however often it is loaded; what is let in is written to `admissions` before it is dispatched. Rounds of held-out
prompts (`operators.evaluation`) have a credit of their own. Credit comes back with `outcomes`; in conventional mode in rounds: nothing
is admitted between the first training step of a round and the last, and a round's samples start under the version that the last step
left. The prompts are pulled by a consumer of its own, only while there is credit: Kafka gives no back-pressure, and a source would pull
the whole topic into state.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Iterable

from kafka import TopicPartition
from pyflink.common import Row, Types
from pyflink.datastream.functions import KeyedProcessFunction, RuntimeContext
from pyflink.datastream.state import ValueStateDescriptor

from operators.dead import DeadLetters
from operators.evaluation import PREFIX, Rounds, held_out, is_evaluation
from operators.lifeline import die_with_parent
from operators.log import OwnedLog, consumer, ends, follow, read
from operators.offload import slot_keys
from operators.ranges import Ranges
from schemas.record import BadRecord, decode, encode, name_of
from schemas.records import Admission, Control, Dispatch, Outcome, Prompt, now
from schemas.settings import EvaluationSettings, Settings
from schemas.topics import ADMISSIONS, CONTROL, HELD_OUT, OUTCOMES, PROMPTS, topic


class Admitter:
    """The ledger and the credit; knows neither Kafka nor Flink.

    >>> a = Admitter("run", batch=4, max_lag=0, group_size=4)
    >>> p = Prompt(dataset="d", dataset_pass=0, prompt_ordinal=0, prompt_id="0", prompt="1+1=", task="exact_match")
    >>> a.admit(p, offset=0).samples, a.credit
    (4, 0)
    """

    def __init__(self, run_id: str, batch: int, max_lag: int, group_size: int, *, conventional: bool = False,
                 evaluation: EvaluationSettings | None = None):
        self.run_id, self.group_size, self.max_lag, self.conventional = run_id, group_size, max_lag, conventional
        self.limit = (max_lag + 1) * batch
        self._evaluation = evaluation or EvaluationSettings()
        self.rounds = Rounds(self._evaluation.every)
        self.version = 0  # newest version known to be trained
        self.next_offset = 0  # of the prompts topic
        self.groups = 0  # admitted so far
        self.closed = False
        self.stopping = False
        self.unresolved: dict[str, set[int]] = {}
        self._unresolved_samples = {False: 0, True: 0}  # by whether they are held out
        self._seen: dict[tuple[str, int], Ranges] = collections.defaultdict(Ranges)
        self._admitted_under = 0  # version when the newest group was admitted

    @property
    def unresolved_samples(self) -> int:
        """Samples to train on without an outcome."""
        return self._unresolved_samples[False]

    @property
    def credit(self) -> int:
        """Samples that may be admitted now."""
        training = self.conventional and self.unresolved_samples and self.version > self._admitted_under
        return 0 if training else self.limit - self.unresolved_samples

    def adopt(self, admissions: Iterable[Admission], outcomes: Iterable[Outcome]) -> list[Admission]:
        """Take up the ledger from the log. Returns the groups with unresolved samples, oldest first."""
        kept = {}
        for a in admissions:
            if a.kind == "evaluation":
                self.rounds.version, self.rounds.prompts = a.policy_version, a.round_prompts
            else:
                self.next_offset = max(self.next_offset, a.prompt_offset + (a.kind == "group"))
            if a.kind == "closed":
                self.closed = True
                continue
            self.groups = max(self.groups, a.admission + 1)
            if a.group_id not in kept:
                kept[a.group_id] = a
                if a.kind == "group":
                    self._admitted_under = a.policy_version
                self._open(a.group_id, a.samples)
        for o in outcomes:
            self.resolve(o)
        return [a for g, a in kept.items() if g in self.unresolved]

    def _open(self, group_id: str, samples: int) -> None:
        dataset, dataset_pass, ordinal = group_id.rsplit("/", 2)
        self._seen[dataset, int(dataset_pass)].add(int(ordinal))
        self.unresolved[group_id] = set(range(samples))
        self._unresolved_samples[is_evaluation(group_id)] += samples

    def resolve(self, o: Outcome) -> None:
        """Credit comes back with the first final outcome of a sample; a repetition is harmless."""
        if o.outcome == "trained":
            self.version = max(self.version, o.step)
        elif o.outcome == "end_of_run":
            self.stopping = True
        if o.outcome == "duplicate":
            return
        waiting = self.unresolved.get(o.group_id)
        if waiting and o.sample_index in waiting:
            waiting.remove(o.sample_index)
            self._unresolved_samples[is_evaluation(o.group_id)] -= 1
            if not waiting:
                del self.unresolved[o.group_id]

    def size_of(self, p: Prompt) -> int:
        return p.group_size or self.group_size

    def refusal(self, p: Prompt) -> str | None:
        """Why a prompt can never be admitted; None if it can."""
        if p.prompt_ordinal < 0 or p.dataset_pass < 0 or "/" in p.dataset or not p.dataset or is_evaluation(p.dataset):
            return (f"identity {p.group_id!r}: dataset must be a name without '/' that does not begin with {PREFIX!r}, pass and ordinal "
                    "not negative")
        if not 0 < self.size_of(p) <= self.limit:
            return (f"group_size {p.group_size} does not fit into the credit of {self.limit} samples, (max_lag + 1) * B: "
                    "raise training.batch or lower the prompt's group_size")
        return None

    def known(self, p: Prompt) -> bool:
        return p.prompt_ordinal in self._seen[p.dataset, p.dataset_pass]

    def admit(self, p: Prompt, offset: int) -> Admission | None:
        """The ledger's entry, or None while there is not enough credit."""
        samples = self.size_of(p)
        if self.closed or self.stopping or samples > self.credit:
            return None
        self._open(p.group_id, samples)
        self.next_offset = offset + 1
        self.groups += 1
        self._admitted_under = self.version
        return Admission(run_id=self.run_id, kind="group", admission=self.groups - 1, group_id=p.group_id, samples=samples,
                         prompt_offset=offset, policy_version=self.version,
                         min_version=self.version if self.conventional else max(0, self.version - self.max_lag),
                         credit=self.credit, admitted_at=now())

    def evaluate(self) -> tuple[Admission, Prompt] | None:
        """The ledger's entry for the next prompt of the round under way, and the prompt; None if there is none, or no credit for it."""
        samples = self._evaluation.samples
        if self.closed or self.stopping or self._unresolved_samples[True] + samples > self._evaluation.credit:
            return None
        while self.rounds.left:
            offset, prompt = self.rounds.left.popleft()
            prompt = held_out(prompt, self.rounds.version, samples)
            if not self.known(prompt):  # else it was admitted before a restart
                break
        else:
            return None
        self._open(prompt.group_id, samples)
        self.groups += 1
        return Admission(run_id=self.run_id, kind="evaluation", admission=self.groups - 1, group_id=prompt.group_id, samples=samples,
                         prompt_offset=offset, policy_version=self.rounds.version, min_version=self.rounds.version, credit=self.credit,
                         admitted_at=now(), round_prompts=self.rounds.prompts), prompt

    def close(self) -> Admission:
        """The last entry: nothing is admitted after it."""
        self.closed = True
        return Admission(run_id=self.run_id, kind="closed", admission=self.groups, group_id="", samples=0, prompt_offset=self.next_offset,
                         policy_version=self.version, min_version=self.version, credit=self.credit, admitted_at=now())


class Slots:
    """Which slot a group goes to: the one with the fewest unresolved samples, so that a slow engine does not hoard the credit."""

    def __init__(self, keys: list[int]):
        self._load = dict.fromkeys(keys, 0)
        self._of: dict[str, tuple[int, int]] = {}

    def take(self, group_id: str, samples: int) -> int:
        key = min(self._load, key=self._load.__getitem__)  # ties: the order of the keys, which alternates between subtasks
        self._load[key] += samples
        self._of[group_id] = (key, samples)
        return key

    def release(self, group_id: str) -> None:
        key, samples = self._of.pop(group_id, (None, 0))
        if key is not None:
            self._load[key] -= samples


class AdmissionFunction(KeyedProcessFunction):
    """Outcomes and control in (key 0), nothing else: a gate has seen to it; Row(slot, dispatch) out, one a sample."""

    LOOK_MS = 50  # how often it looks for new prompts while there is credit

    def __init__(self, settings: Settings):
        self.settings = settings

    def open(self, context: RuntimeContext) -> None:
        die_with_parent(silence_s=self.settings.flink.silence_timeout_s)
        self._dispatched = context.get_state(ValueStateDescriptor("dispatched", Types.LONG()))
        self._admitter: Admitter | None = None
        self._timers: set[int] = set()  # registered and not yet due
        metrics = context.get_metrics_group().add_group("pipelinerl")
        metrics.gauge("unresolved", lambda: self._admitter.unresolved_samples if self._admitter else 0)
        metrics.gauge("admitted_groups", lambda: self._admitter.groups if self._admitter else 0)

    def process_element(self, value: bytes, ctx: KeyedProcessFunction.Context):
        if self._admitter is None:
            yield from self._start()
        value = bytes(value)
        if name_of(value) == Outcome.record_name:
            for o in decode(Outcome, value):
                self._admitter.resolve(o)
                if o.group_id not in self._admitter.unresolved:
                    self._slots.release(o.group_id)
        else:
            for c in decode(Control, value):
                self._admitter.stopping |= c.kind == "stop"
                self._ending |= c.kind == "end_of_prompts"
        yield from self._admit()
        self._arm(ctx)

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext):
        if self._admitter is None:
            yield from self._start()
        yield from self._admit()
        self._arm(ctx)

    def close(self) -> None:
        if self._admitter is not None:
            self._log.close()
            self._prompts.close()

    def _arm(self, ctx) -> None:
        # Outcomes bring credit and wake this function; between them it looks for new prompts only while it could admit one. The far
        # timer survives a restore that loses the near one (registered in the bundle that the checkpoint flushed).
        now_ms = ctx.timer_service().current_processing_time()
        wanted = {(now_ms // 1000 + 2) * 1000}
        if self._admitter.credit >= self._admitter.group_size and not self._admitter.closed:
            wanted.add((now_ms // self.LOOK_MS + 1) * self.LOOK_MS)
        for at in wanted - self._timers:  # each costs a message to the JVM
            ctx.timer_service().register_processing_time_timer(at)
        self._timers = {at for at in self._timers | wanted if at > now_ms}

    def _start(self):
        """Fence the predecessor, take up the ledger, dispatch again what the restored state does not hold."""
        s, run = self.settings, self.settings.run.id
        self._topic, self._ledger = topic(run, PROMPTS), topic(run, ADMISSIONS)
        self._dead = DeadLetters(s.kafka, run, "admission", self._topic)
        self._log = OwnedLog(s.kafka, f"{run}.admission")
        self._admitter = Admitter(run, s.training.batch, s.training.max_lag, s.grouping.group_size,
                                  conventional=s.run.mode == "conventional", evaluation=s.evaluation)
        open_groups = self._admitter.adopt(self._log.rows(Admission, self._ledger), self._log.rows(Outcome, topic(run, OUTCOMES)))
        controls = list(self._log.rows(Control, topic(run, CONTROL)))
        self._ending = any(c.kind == "end_of_prompts" for c in controls)
        self._admitter.stopping |= any(c.kind == "stop" for c in controls)
        keys = slot_keys(s.generation.slots)
        for key in keys:  # Flink opens an operator at its first record: wake the engines, which load while the trainer does
            yield Row(key, b"")
        self._slots = Slots(keys)
        self._prompts = consumer(s.kafka)
        self._partition = TopicPartition(self._topic, 0)
        self._prompts.assign([self._partition])
        self._waiting: collections.deque = collections.deque()
        self._looked_at, self._held_out, self._held_out_end = 0.0, {}, 0
        held = self._dispatched.value() or 0
        rounds = self._admitter.rounds
        if rounds.version is not None:
            held_out_at = dict(self._read_held_out())
            if rounds.every is not None:  # the rest of the round that was under way: `evaluate` knows what was admitted of it
                rounds.left.extend(held_out_at.items())
        for a in open_groups:
            if a.admission < held:  # it lies in the generation operator's state
                self._slots.take(a.group_id, a.samples)
            elif a.kind == "evaluation":
                yield from self._dispatch(a, encode([held_out(held_out_at[a.prompt_offset], a.policy_version, a.samples)]), attempt=1)
            else:
                yield from self._dispatch(a, self._prompt_at(a.prompt_offset), attempt=1)
        self._dispatched.update(max(held, self._admitter.groups))
        self._prompts.seek(self._partition, self._admitter.next_offset)
        self._end_offset: int | None = None

    def _read_held_out(self) -> list[tuple[int, Prompt]]:
        """(offset, prompt) of all held-out prompts, each once. Reads what has come since the last time."""
        name = topic(self.settings.run.id, HELD_OUT)
        for m in read(self.settings.kafka, name, self._held_out_end):
            self._held_out_end = m.offset + 1
            try:
                for p in decode(Prompt, m.value):
                    if refusal := self._admitter.refusal(p):
                        raise BadRecord(refusal)
                    self._held_out.setdefault(p.group_id, (m.offset, p))
            except BadRecord as e:
                self._dead(f"{name} offset {m.offset}: {e}", m.value)
        return list(self._held_out.values())

    def _prompt_at(self, offset: int) -> bytes:
        self._prompts.seek(self._partition, offset)
        for _ in range(int(self.settings.kafka.timeout_s * 10)):
            for m in follow(self._prompts, timeout_ms=100):
                if m.offset == offset:
                    return m.value
                raise LookupError(f"{self._topic} no longer holds offset {offset}, a prompt in flight: its retention cut too much")
        raise LookupError(f"{self._topic}: no prompt at offset {offset} within {self.settings.kafka.timeout_s:g} s")

    def _admit(self):
        """Let in what the credit allows; entries first, then their dispatches."""
        entries: list[tuple[Admission, bytes]] = []
        a = self._admitter
        while not (a.closed or a.stopping) and a.credit > 0:
            if not self._waiting:
                self._waiting.extend(follow(self._prompts, timeout_ms=0))
                if not self._waiting:
                    break
            m = self._waiting[0]
            try:
                prompt = decode(Prompt, m.value)
                if len(prompt) != 1:
                    raise BadRecord(f"{len(prompt)} prompts in one message, expected 1")
                if refusal := a.refusal(prompt[0]):
                    raise BadRecord(refusal)
            except BadRecord as e:
                self._dead(f"{self._topic} offset {m.offset}: {e}", m.value)
                self._waiting.popleft()
                continue
            if not a.known(prompt[0]):
                entry = a.admit(prompt[0], m.offset)
                if entry is None:
                    break
                entries.append((entry, m.value))
            self._waiting.popleft()
        if a.rounds.due(a.version) and not (a.closed or a.stopping) and time.monotonic() - self._looked_at > 1.0:
            self._looked_at = time.monotonic()  # nothing may be loaded yet
            if prompts := self._read_held_out():
                a.rounds.begin(a.version, prompts)
        while (evaluation := a.evaluate()) is not None:
            entries.append((evaluation[0], encode([evaluation[1]])))
        if self._at_end():
            entries.append((a.close(), b""))
        self._log.append((self._ledger, None, encode([entry])) for entry, _ in entries)
        for entry, prompt in entries:
            if entry.kind != "closed":
                yield from self._dispatch(entry, prompt, attempt=0)
        if entries:
            self._dispatched.update(a.groups)

    def _at_end(self) -> bool:
        a = self._admitter
        if a.closed:
            return False
        if a.stopping:
            return True
        if not self._ending or self._waiting:
            return False
        if self._end_offset is None:
            self._end_offset = ends(self._prompts, self._topic)[self._partition]
        return self._prompts.position(self._partition) >= self._end_offset

    def _dispatch(self, a: Admission, prompt: bytes, attempt: int):
        slot, greedy = self._slots.take(a.group_id, a.samples), a.kind == "evaluation" and self.settings.evaluation.greedy
        for i in sorted(self._admitter.unresolved[a.group_id]):
            yield Row(slot, encode([Dispatch(
                admission=a.admission, group_id=a.group_id, sample_index=i, group_size=a.samples, attempt=attempt,
                min_version=a.min_version, policy_version=a.policy_version, prompt=prompt, dispatched_at=now(), greedy=greedy or None)]))
