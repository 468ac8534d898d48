"""Grade rollouts: fills reward, reward_components, reward_status and scored_at, and touches nothing else.

Promises: every row of every rollout comes out once; a reward is a finite number or null, and null whenever no grader said what it is worth
(timeout, parse_error, error): a failed grader is not a reward of 0. Grading happens in child processes that are killed and replaced when a
row takes longer than `reward.timeout_s`, so a grader that never returns costs one row. What is no rollout goes to the dead letters.

Knows nothing of groups or advantages; a row that did not end by itself (abort, error, ...) passes through ungraded.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import queue
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa

from operators.child import Child, ChildDied
from operators.evaluation import is_evaluation
from operators.grader import DONE, GRADE, READY, STARTED
from schemas.record import BadRecord, encode_batch, read
from schemas.records import Rollout, now
from schemas.settings import RewardSettings, Settings
from schemas.topics import ROLLOUTS, topic

GRADED_REASONS = ("stop", "length")
LOAD_TIMEOUT_S = 120.0  # for what a grader imports before its first row
LOOK_AHEAD_S = 0.05  # a child gets rows for about two ticks, so that it never idles and rows do not queue behind a slow one
MAX_WINDOW = 128  # rows
MAX_START_FAILURES = 3
PIPE_BYTES = 1 << 20

log = logging.getLogger(__name__)


class GradersDoNotStart(RuntimeError):
    """Grading processes die before they are ready; the text carries their last words."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What grading made of a row: components whose sum is the reward, or a status that says why there is none."""

    status: str
    components: dict[str, float] | None = None
    cause: str | None = None
    graded: bool = True  # false: nobody tried

    @property
    def reward(self) -> float | None:
        return None if self.components is None else math.fsum(self.components.values())


def verdict_of(components: dict[str, float]) -> Verdict:
    """Components that add up to a number make a reward; others are the grader's error."""
    if not components:
        return Verdict("error", cause="the grader returned no components")
    names = [name for name, value in components.items() if not _is_float32(value)]
    if names or not _is_float32(math.fsum(components.values())):
        return Verdict("error", cause=f"the grader's components are no finite numbers: { {n: components[n] for n in names or components} }")
    return Verdict("ok", components)


def _is_float32(value: float) -> bool:
    return math.isfinite(value) and abs(value) <= 3.4028234e38


def length_penalty(response_tokens: int, max_tokens: int, settings: RewardSettings) -> float:
    """0 up to `length_penalty_tokens` before max_tokens, then linearly down to -length_penalty at max_tokens."""
    over = (response_tokens - (max_tokens - settings.length_penalty_tokens)) / settings.length_penalty_tokens
    return -settings.length_penalty * min(max(over, 0.0), 1.0)


def scored(rollouts: pa.Table, verdicts: Sequence[Verdict], at: datetime) -> bytes:
    """The rollouts as one message with their verdicts filled in; all other columns are the same buffers."""
    columns: dict[str, list] = {
        "reward": [v.reward for v in verdicts],
        "reward_components": [v.components and list(v.components.items()) for v in verdicts],
        "reward_status": [v.status for v in verdicts],
        "scored_at": [at if v.graded else None for v in verdicts],
    }
    schema = rollouts.schema
    arrays = list(rollouts.columns)
    for name, values in columns.items():
        i = schema.get_field_index(name)
        arrays[i] = pa.array(values, type=schema.field(i).type)
    return encode_batch(pa.Table.from_arrays(arrays, schema=schema))


@dataclass(slots=True)
class _Record:
    ident: str
    rollouts: pa.Table
    verdicts: list[Verdict | None]
    missing: int


@dataclass(slots=True)
class _Row:
    record: _Record
    index: int
    request: bytes
    deaths: int = 0


@dataclass(slots=True, eq=False)
class _Worker:
    child: Any = None
    ready: bool = False
    sent: deque[_Row] = field(default_factory=deque)  # the first is being graded once `started` is set
    sent_bytes: int = 0
    window_bytes: int = 0  # of requests that may lie in the child's pipe: sending must not block
    started: float | None = None
    waiting_since: float = 0.0  # since when the child owes a STARTED


class RewardService:
    """Grades rollout records in `settings.workers` child processes; a `Service` of `operators.offload`.

    `dead(cause, original, group_id=None, sample_index=None)` takes what cannot be used; `modules` are imported by the grading processes and
    may register further tasks. All methods are for one thread and do not block. `counts` holds rows by status.
    """

    def __init__(self, settings: RewardSettings, dead: Callable[..., None], *, modules: Sequence[str] = (),
                 start_child: Callable[..., Any] = Child, clock: Callable[[], float] = time.monotonic):
        self.settings, self.counts = settings, Counter()
        self._dead, self._modules, self._start_child, self._clock = dead, list(modules), start_child, clock
        self._events: queue.SimpleQueue = queue.SimpleQueue()  # children's reader threads put, the owner's thread takes
        self._waiting: deque[_Row] = deque()
        self._finished: list[tuple[str, list[bytes]]] = []
        self._in_flight: set[str] = set()
        self._row_s = LOOK_AHEAD_S  # mean time of a grading; decides how far ahead children are fed
        self._start_failures = 0
        self._workers = [self._start() for _ in range(settings.workers)]

    def submit(self, ident: str, record: bytes, attempt: int = 0) -> None:
        """Take a message of rollouts; a record that is none is answered with nothing and becomes a dead letter."""
        if ident in self._in_flight:
            return
        self._in_flight.add(ident)
        try:
            rollouts = read(Rollout, record)
        except BadRecord as e:
            self._dead(f"reward cannot read a rollout: {e}", record)
            self._finish(ident, [])
            return
        rows = rollouts.num_rows
        taken = _Record(ident, rollouts, [None] * rows, rows)
        if not rows:
            self._finish(ident, [])
        columns = [rollouts.column(n) for n in ("finish_reason", "task", "completion", "answer", "task_metadata")]
        for i in range(rows):
            reason, task, completion, answer, metadata = (c[i].as_py() for c in columns)
            if reason not in GRADED_REASONS:
                self._settle(taken, i, Verdict("error", graded=False))
                continue
            request = {"task": task, "completion": completion, "answer": answer, "metadata": metadata}
            self._waiting.append(_Row(taken, i, json.dumps(request).encode()))
        self._feed()

    def drain(self) -> list[tuple[str, list[bytes]]]:
        """(ident, [message]) of the records whose rows are all graded; without a message for what was no rollout."""
        self.poll()
        finished, self._finished = self._finished, []
        return finished

    def poll(self) -> None:
        """Hear the children, end those that take too long, feed the others. Raises GradersDoNotStart."""
        while True:
            try:
                worker, kind, payload, at = self._events.get_nowait()
            except queue.Empty:
                break
            if worker in self._workers:  # a replaced child's last words count no more
                self._hear(worker, kind, payload, at)
        for worker in list(self._workers):
            self._check(worker)
        self._feed()

    def close(self) -> None:
        """End the children at once, whatever they are grading."""
        for worker in self._workers:
            worker.child.kill()
            worker.child.close()
        self._workers = []

    @property
    def depth(self) -> int:
        """Records taken and not yet answered."""
        return len(self._in_flight)

    # -- children

    def _start(self) -> _Worker:
        worker = _Worker()
        config = {"modules": self._modules, "memory_mb": self.settings.memory_mb, "timeout_s": self.settings.timeout_s}

        def frame(kind: int, payload: bytes) -> None:
            self._events.put((worker, kind, payload, self._clock()))

        def death(cause: str) -> None:
            self._events.put((worker, None, cause, self._clock()))

        worker.waiting_since = self._clock()
        # One thread a process: graders run side by side with engines and ranks.
        worker.child = self._start_child("operators.grader", config, on_frame=frame, on_death=death,
                                         env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"})
        worker.window_bytes = _pipe_bytes(worker.child) // 2
        return worker

    def _replace(self, worker: _Worker) -> None:
        """Another child for a dead one; the rows it still had come first."""
        self._waiting.extendleft(reversed(worker.sent))
        self._workers[self._workers.index(worker)] = self._start()

    def _hear(self, worker: _Worker, kind: int | None, payload: bytes, at: float) -> None:
        if kind is None:
            self._mourn(worker, payload, at)
        elif kind == READY:
            worker.ready, worker.waiting_since, self._start_failures = True, at, 0
        elif kind == STARTED:
            worker.started = at
        elif kind == DONE:
            row = worker.sent.popleft()
            worker.sent_bytes -= len(row.request)
            if worker.started is not None:
                self._row_s += 0.1 * (at - worker.started - self._row_s)
            worker.started, worker.waiting_since = None, at
            self._settle(row.record, row.index, self._verdict(row, json.loads(payload)))

    def _mourn(self, worker: _Worker, cause: str, at: float) -> None:
        """A child died by itself: the row it was at gets one more try, then it is the row's error."""
        if not worker.ready:
            self._start_failures += 1
            if self._start_failures >= MAX_START_FAILURES:
                raise GradersDoNotStart(f"{self._start_failures} grading processes in a row died before they were ready: {cause}")
        elif worker.started is not None and at - worker.started >= self.settings.timeout_s:
            row = worker.sent.popleft()
            self._settle(row.record, row.index, self._timeout())
        elif worker.sent:
            worker.sent[0].deaths += 1
            if worker.sent[0].deaths > 1:
                row = worker.sent.popleft()
                self._settle(row.record, row.index, Verdict("error", cause=f"the grader killed its process twice: {cause}"))
        self._replace(worker)

    def _check(self, worker: _Worker) -> None:
        time_now = self._clock()
        if worker.started is not None:
            if time_now - worker.started < self.settings.timeout_s:
                return
            row = worker.sent.popleft()
            verdict = self._timeout()
        elif worker.sent or not worker.ready:
            if time_now - worker.waiting_since < LOAD_TIMEOUT_S:
                return
            if not worker.sent:
                raise GradersDoNotStart(f"a grading process is not ready after {LOAD_TIMEOUT_S:g} s: "
                                        f"a module of {self._modules} hangs at import")
            row = worker.sent.popleft()
            verdict = Verdict("error", cause=f"what the grader imports is not there after {LOAD_TIMEOUT_S:g} s")
        else:
            return
        self._replace(worker)
        worker.child.kill()
        worker.child.close()
        self._settle(row.record, row.index, verdict)

    def _timeout(self) -> Verdict:
        return Verdict("timeout", cause=f"the grader took longer than reward.timeout_s = {self.settings.timeout_s:g} s")

    def _feed(self) -> None:
        window = min(MAX_WINDOW, max(2, int(LOOK_AHEAD_S / max(self._row_s, 1e-6))))
        while self._waiting:
            size = len(self._waiting[0].request)
            free = [w for w in self._workers if w.ready and len(w.sent) < window and (not w.sent or w.sent_bytes + size <= w.window_bytes)]
            if not free:
                return
            worker = min(free, key=lambda w: len(w.sent))
            row = self._waiting.popleft()
            if not worker.sent:
                worker.waiting_since = self._clock()
            worker.sent.append(row)
            worker.sent_bytes += size
            try:
                worker.child.send(GRADE, row.request)
            except ChildDied:
                return  # its death is on its way and puts the row back

    # -- rows

    def _verdict(self, row: _Row, answer: dict) -> Verdict:
        rollouts = row.record.rollouts
        if "unknown" in answer:
            self._dead(answer["unknown"], encode_batch(rollouts.slice(row.index, 1)), rollouts.column("group_id")[row.index].as_py(),
                       rollouts.column("sample_index")[row.index].as_py())
            return Verdict("error", cause=answer["unknown"])
        if "failure" in answer:
            return Verdict(answer["failure"], cause=answer["cause"])
        components = answer["components"]
        if components and self.settings.penalize_length and not is_evaluation(rollouts.column("group_id")[row.index].as_py()):
            response = len(rollouts.column("token_ids")[row.index]) - rollouts.column("prompt_length")[row.index].as_py()
            max_tokens = rollouts.column("sampling")[row.index]["max_tokens"].as_py()
            components["length_penalty"] = length_penalty(response, max_tokens, self.settings)
        return verdict_of(components)

    def _settle(self, record: _Record, index: int, verdict: Verdict) -> None:
        self.counts[verdict.status if verdict.graded else "ungraded"] += 1
        if verdict.cause is not None:
            group, sample, task = (record.rollouts.column(n)[index].as_py() for n in ("group_id", "sample_index", "task"))
            log.warning("sample %s of %s (task %s) has no reward: %s: %s", sample, group, task, verdict.status, verdict.cause)
        record.verdicts[index] = verdict
        record.missing -= 1
        if not record.missing:
            self._finish(record.ident, [scored(record.rollouts, record.verdicts, now())])

    def _finish(self, ident: str, outputs: list[bytes]) -> None:
        self._in_flight.discard(ident)
        self._finished.append((ident, outputs))


def _pipe_bytes(child: Any) -> int:
    """Capacity of the pipe to a child, enlarged where the kernel allows it."""
    pipe = child.process.stdin.fileno()
    try:
        return fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    except PermissionError:  # the user's limit on pipe memory is reached
        return fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)


def reward(settings: Settings, modules: Sequence[str] = ()):
    """The reward operator: rollout messages in, scored rollout messages out."""
    from operators.dead import DeadLetters
    from operators.offload import Offload

    def make(runtime) -> RewardService:
        dead = DeadLetters(settings.kafka, settings.run.id, "reward", topic(settings.run.id, ROLLOUTS))
        service = RewardService(settings.reward, dead, modules=modules)
        runtime.gauge("reward_in_flight", lambda: service.depth)
        for status in ("ok", "timeout", "parse_error", "error", "ungraded"):
            runtime.gauge(f"reward_{status}", lambda status=status: service.counts[status])
        return service

    return Offload(make, tick_ms=settings.flink.tick_ms, name="preprocess", silence_s=settings.flink.silence_timeout_s)
