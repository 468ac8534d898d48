"""An engine's loop: H sequences in flight, slots refilled at once, weights changed between two of its steps. Child process of generation.

Promises:
- A slot that frees is taken by the next waiting sample before the next step; each sequence is answered the moment it ends.
- Nothing is served before the newest version that was on offer when `serve` came has been applied, and no sample before its `min_version`.
- When a checked version is applied is `weights.update_every`'s to say (`UpdateRule`); it never keeps a sample waiting that needs it.
- Applying is a transaction: bytes, digest, names, shapes and dtypes are checked by a loader thread while generation goes on; if the write
  itself fails, the held version is written again or the process ends. The label moves with success only.
- A sequence that grows older than max_lag is aborted: every batch it could enter would find it stale.

`EngineLoop` knows nothing of vLLM, pipes or threads; `python -m operators.engine` gives it all three.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from datetime import datetime
from typing import Protocol

from operators.child import Parent
from operators.engine_frames import ACK, OFFER, READY, RESULT, SERVE, STATS, SUBMIT, WRITING, pack_result, unpack_offer, unpack_submit
from operators.evaluation import is_evaluation
from operators.loader import Arrival, LoadedWeights, Loader, WeightFiles
from operators.packing import consecutive
from operators.rollouts import Request, Rollouts, Sampled, label, tokenizer_digest, version_of
from operators.weights import BadWeights, where
from schemas.record import decode, encode
from schemas.records import Ack, Rollout, Weights, now
from schemas.settings import GenerationSettings, ModelSettings

STATS_EVERY_S = 0.25
MESSAGE_TOKENS = 1 << 16  # of rollouts that are sent together: a megabyte or two
HEARTBEAT_S = 5.0  # measures are said this often even if they stay the same
SAMPLES_A_TURN = 8  # while all slots are taken, tokenising new samples must not hold up the next step

log = logging.getLogger(__name__)


class Engine(Protocol):
    """What the loop needs of an engine. Requests are known by their ident, versions by their label."""

    def add(self, ident: str, prompt_ids: list[int], max_tokens: int, salt: str | None, greedy: bool) -> None:
        """Take a request in. `salt` separates its KV cache from others'; `greedy` takes the most probable token each time.

        Raises ValueError if it cannot be served."""

    def step(self) -> list[Sampled]:
        """One forward pass for every sequence; what ended with it."""

    def progress(self, ident: str) -> tuple[str | None, int]:
        """Label of the first sampled token (None before there is one) and the number of tokens sampled so far."""

    def abort(self, idents: list[str]) -> list[Sampled]:
        """End sequences; what they had."""

    def prepare(self, weights: LoadedWeights) -> bool:
        """What can be done for `write` while steps go on; called by the loader's thread. The model's weights stay as they are.

        True if all is done, so that `write` needs no tensors."""

    def write(self, weights: LoadedWeights) -> None:
        """Put weights into the model. After an exception the model is writable again, but its weights belong to no version."""

    def set_label(self, label: str) -> None:
        """Tokens of later steps carry this label."""

    def reset_cache(self) -> None:
        """Throw the KV cache away; sequences in flight recompute theirs."""


@dataclasses.dataclass(frozen=True)
class UpdateRule:
    """When an engine applies a version that is ready (`weights.update_every`, `weights.chunked_generation`).

    `unit` version: when it is `count` or more above the held one. `unit` token: when some sequence in flight has `count` tokens since the
    last update. `chunk`: also before a step in which a sequence would pass a multiple of so many tokens.
    """

    count: int = 1
    unit: str = "version"
    chunk: int | None = None

    def due(self, ahead: int, since: Iterable[int], lengths: Iterable[int]) -> bool:
        """`ahead`: versions between held and ready; tokens since the last update, and in all, of each sequence in flight."""
        if self.unit == "version" and ahead >= self.count:
            return True
        if self.unit == "token" and max(since, default=0) >= self.count:
            return True
        return self.chunk is not None and any(n and n % self.chunk == 0 for n in lengths)


class EngineLoop:
    """The loop's logic; `turn()` is one round of it. `send(kind, payload)` takes frames for the operator."""

    def __init__(self, engine: Engine, rollouts: Rollouts, loader: Loader, send: Callable[[int, bytes], None], *, run_id: str,
                 generator_id: str, capacity: int, max_lag: int, kv_cache_mode: str, rule: UpdateRule = UpdateRule(),
                 gather_s: float = 0.0, clock: Callable[[], float] = time.time):
        self._engine, self._rollouts, self._loader, self._send = engine, rollouts, loader, send
        self._run_id, self._generator_id, self._clock = run_id, generator_id, clock
        self._capacity, self._max_lag, self._kv_cache_mode = capacity, max_lag, kv_cache_mode
        self._waiting: collections.deque[Request] = collections.deque()
        self._gated: list[tuple[int, int, Request]] = []  # heap by min_version: samples that must not start on the held version
        self._order = itertools.count()
        self._in_flight: dict[str, Request] = {}
        self._first_token_at: dict[str, datetime] = {}
        self._unstarted: set[str] = set()  # in flight, nothing sampled yet
        self._held: LoadedWeights | None = None
        self._rule = rule
        self._arrival: Arrival | None = None  # the newest version that is ready and not applied yet
        self._ended_rows: list[tuple[str, Rollout]] = []  # (ident, rollout) to be sent together
        self._gather_s, self._sent_at = gather_s, 0.0
        self._lengths_at_update: dict[str, int] = {}  # tokens of the sequences that were in flight then
        self._digests: dict[str, str] = {}
        self._offered: tuple[int, int] | None = None  # newest ever
        self._wanted: tuple[int, int] | None = None  # being loaded, or ready and waiting for its time
        self._gate: tuple[int, int] | None = None
        self._serving = False
        self._generated = self._busy_steps = self._in_flight_sum = self._capacity_sum = 0
        self._stats_at, self._said_at, self._stats_said = 0.0, 0.0, b""

    @property
    def hungry(self) -> bool:
        """More samples could be in flight than it has."""
        return len(self._in_flight) + len(self._waiting) < self._capacity

    def submit(self, ident: str, attempt: int, record: bytes) -> None:
        self._queue(self._rollouts.request(ident, attempt, record))

    def offer(self, event: Weights, heard_at: float) -> None:
        """A version is on offer. Ordered by (epoch, version): what is not newer than the held or wanted one is ignored."""
        key = event.epoch, event.version
        self._offered = max(key, self._offered or key)
        if (self._held is not None and key <= _key(self._held)) or (self._wanted is not None and key <= self._wanted):
            return
        self._wanted = key
        # What was on offer before this engine could hear it says nothing of how fast it hears.
        self._loader.offer(event, heard_at if self._serving else None)

    def serve(self) -> None:
        """What was on offer when the operator opened has been said: serve once the newest of it is held."""
        self._serving, self._gate = True, self._offered

    def turn(self) -> bool:
        """One round: apply what is ready, refill the slots, one step. False if there was nothing to do."""
        worked = self._turn()
        if self._ended_rows and (not self._in_flight or self._clock() - self._sent_at >= self._gather_s):
            self._send_ended()
        return worked

    def _turn(self) -> bool:
        applied = False
        while (arrival := self._loader.take()) is not None:
            applied = True
            self._arrived(arrival)
        applied |= self._apply_if_due()
        self._say_stats()
        if not self._ready():
            return applied
        self._refill()
        if not self._in_flight:
            return applied
        self._busy_steps += 1
        self._in_flight_sum += len(self._in_flight)
        self._capacity_sum += min(self._capacity, len(self._in_flight) + self._waiting_count())
        ended = self._engine.step()
        if self._unstarted:
            self._note_first_tokens({s.ident for s in ended if s.token_ids})
        for sampled in ended:
            self._ended(sampled)
        return True

    # --- samples

    def _ready(self) -> bool:
        return self._serving and self._held is not None and (self._gate is None or _key(self._held) >= self._gate)

    def _waiting_count(self) -> int:
        return len(self._waiting) + len(self._gated)

    def _queue(self, request: Request) -> None:
        held = self._held.event.version if self._held is not None else -1
        if request.dispatch.min_version > held:
            heapq.heappush(self._gated, (request.dispatch.min_version, next(self._order), request))
        else:
            self._waiting.append(request)

    def _refill(self) -> None:
        held = self._held.event
        while self._waiting and len(self._in_flight) < self._capacity:
            request = self._waiting.popleft()
            if request.dispatch.min_version > held.version:  # an epoch began below it while it waited
                self._queue(request)
                continue
            if request.refusal is None:
                salt = label(held.epoch, held.version) if self._kv_cache_mode == "reuse_partial" else None
                try:
                    self._engine.add(request.ident, request.prompt_ids, request.max_tokens, salt, bool(request.dispatch.greedy))
                except ValueError as e:
                    request.refusal = "error", f"the engine does not take the prompt: {e}"
            if request.refusal is not None:
                self._ended_rows.append((request.ident, self._rollouts.refused(request, held.digest)))
                continue
            self._in_flight[request.ident] = request
            self._unstarted.add(request.ident)

    def _note_first_tokens(self, ended: set[str]) -> None:
        at = now()
        started = [i for i in self._unstarted if i in ended or self._engine.progress(i)[1]]
        for ident in started:
            self._first_token_at[ident] = at
        self._unstarted.difference_update(started)

    def _ended(self, sampled: Sampled, cause: str | None = None) -> None:
        request = self._in_flight.pop(sampled.ident)
        self._unstarted.discard(sampled.ident)
        self._generated += len(sampled.logprobs)
        first = self._first_token_at.pop(sampled.ident, None)
        rollout = self._rollouts.finished(request, sampled, first, self._digests, self._held.event.digest, cause)
        self._ended_rows.append((request.ident, rollout))

    def _send_ended(self) -> None:
        """Together: where sequences are short, a message for each would cost more than to sample it."""
        rows, self._ended_rows, self._sent_at = self._ended_rows, [], self._clock()
        for part in consecutive([len(r.token_ids) for _, r in rows], MESSAGE_TOKENS):
            idents, rollouts = zip(*rows[part], strict=True)
            self._send(RESULT, pack_result(idents, rollouts[0].group_id, encode(rollouts)))

    # --- weights

    def _arrived(self, arrival: Arrival) -> None:
        """A version is ready, and takes the place of an older one that waited for its time; or it is refused."""
        if arrival.cause is None:
            if self._arrival is not None:
                self._arrival.weights.close()
            self._arrival = arrival
            return
        self._apply_if_due()  # it came first
        key = arrival.event.epoch, arrival.event.version
        if self._wanted == key:
            self._wanted = None if self._arrival is None else _key(self._arrival.weights)
        self._ack(arrival, {}, arrival.cause)

    def _apply_if_due(self) -> bool:
        if self._arrival is None or not self._due(self._arrival):
            return False
        arrival, self._arrival = self._arrival, None
        self._apply(arrival)
        return True

    def _due(self, arrival: Arrival) -> bool:
        held, event = self._held, arrival.event
        if held is None or not self._in_flight or event.epoch != held.event.epoch or self._rule == UpdateRule():
            return True
        if self._gated and len(self._in_flight) + len(self._waiting) < self._capacity:
            return True  # a slot is free, and what could take it must not start on the held version
        lengths = {i: self._engine.progress(i)[1] for i in self._in_flight}
        since = (n - self._lengths_at_update.get(i, 0) for i, n in lengths.items())
        return self._rule.due(event.version - held.event.version, since, lengths.values())

    def _apply(self, arrival: Arrival) -> None:
        key = arrival.event.epoch, arrival.event.version
        if self._wanted == key:
            self._wanted = None
        started = self._clock()
        phases = {}
        if arrival.heard_at is not None:
            phases["wait"] = max(0.0, (started - arrival.heard_at) * 1000 - sum(arrival.phases_ms.values()))
        previous, new = self._held, arrival.weights
        self._send(WRITING, str(new.event.version).encode())  # until its ack
        try:
            self._write(new)
        except Exception as e:  # whatever it was: the weights belong to no version now
            cause = f"writing version {new.event.version} failed: {type(e).__name__}: {e}"
            new.close()
            self._restore(previous, cause)
            phases["apply"] = (self._clock() - started) * 1000
            self._ack(arrival, phases, cause)
            return
        name = label(*key)
        self._engine.set_label(name)
        self._digests[name] = new.event.digest
        self._held = new
        new.release()
        if previous is not None:
            previous.close()
        phases["apply"] = (self._clock() - started) * 1000
        self._lengths_at_update = {i: self._engine.progress(i)[1] for i in self._in_flight}
        self._abort_stale()
        while self._gated and self._gated[0][0] <= new.event.version:
            self._waiting.append(heapq.heappop(self._gated)[2])
        self._ack(arrival, phases, None)

    def _write(self, weights: LoadedWeights) -> None:
        self._engine.write(weights)
        if self._kv_cache_mode == "recompute":
            self._engine.reset_cache()

    def _restore(self, previous: LoadedWeights | None, cause: str) -> None:
        if previous is None:
            return  # nothing has been served yet, and nothing will be before a version is held
        log.warning(f"engine: {cause}; version {previous.event.version} is written again")
        try:
            self._write(previous)
        except Exception as e:
            raise RuntimeError(f"{cause}; and the held version {previous.event.version} could not be written again: "
                               "the engine ends, because its weights belong to no version") from e
        previous.release()

    def _abort_stale(self) -> None:
        # A row that ends under version v enters batch v + 1 at the earliest, with lag v - first.
        newest = self._held.event.version
        firsts = {i: self._engine.progress(i)[0] for i in self._in_flight}
        lags = {i: newest - version_of(first) for i, first in firsts.items() if first is not None}
        stale = [i for i, lag in lags.items() if lag > self._max_lag and not is_evaluation(self._in_flight[i].dispatch.group_id)]
        if stale:
            for sampled in self._engine.abort(stale):
                lag = lags[sampled.ident]
                self._ended(sampled, f"older than max_lag: its first token is {lag} versions old, training.max_lag is {self._max_lag}")

    def _ack(self, arrival: Arrival, phases: dict[str, float], cause: str | None) -> None:
        event = arrival.event
        heard = {} if arrival.heard_at is None else {"heard": (arrival.heard_at - event.offered_at.timestamp()) * 1000}
        self._send(ACK, encode([Ack(
            run_id=self._run_id, generator_id=self._generator_id, status="applied" if cause is None else "failed", epoch=event.epoch,
            version=event.version, digest=event.digest, cause=cause,
            phases_ms=list((heard | arrival.phases_ms | phases).items()), in_flight=len(self._in_flight),
            waiting=self._waiting_count(), generated_tokens=self._generated_tokens(), busy_steps=self._busy_steps,
            in_flight_sum=self._in_flight_sum, capacity_sum=self._capacity_sum, at=now())]))

    # --- measures

    def _generated_tokens(self) -> int:
        return self._generated + sum(self._engine.progress(i)[1] for i in self._in_flight)

    def _say_stats(self) -> None:
        at = self._clock()
        if at - self._stats_at < STATS_EVERY_S:
            return
        self._stats_at = at
        stats = json.dumps({"in_flight": len(self._in_flight), "waiting": self._waiting_count(),
                            "held_version": self._held.event.version if self._held is not None else -1,
                            "generated_tokens": self._generated_tokens()}).encode()
        if stats != self._stats_said or at - self._said_at >= HEARTBEAT_S:
            self._stats_said, self._said_at = stats, at
            self._send(STATS, stats)


def prepared(files: WeightFiles, engine: Engine) -> Callable[[Weights], tuple[LoadedWeights, dict[str, float]]]:
    """What a `Loader` calls: fetch and check a version, and prepare the engine for it. Raises BadWeights."""

    def load(event: Weights) -> tuple[LoadedWeights, dict[str, float]]:
        weights, phases = files.load(event)
        started = time.perf_counter()
        try:
            if engine.prepare(weights):
                weights.release()  # here: to unmap them takes longer than the pause
        except Exception as e:  # of the model's own loaders, which raise what they like
            weights.close()
            raise BadWeights(f"{where(event)} cannot be packed: {type(e).__name__}: {e}") from e
        return weights, phases | {"pack": (time.perf_counter() - started) * 1000}

    return load


def _key(weights: LoadedWeights) -> tuple[int, int]:
    return weights.event.epoch, weights.event.version


def run(parent: Parent) -> None:
    """The child process: frames in, frames out, the loop in this thread."""
    config = parent.config
    settings, model = GenerationSettings.model_validate(config["generation"]), ModelSettings.model_validate(config["model"])
    samples: collections.deque[bytes] = collections.deque()
    commands: collections.deque[tuple[int, bytes]] = collections.deque()  # versions do not queue behind samples
    wake = threading.Event()

    def read() -> None:
        for kind, payload in parent.incoming():  # ends the process with the pipe, also while the engine still loads
            if kind == SUBMIT:
                samples.append(payload)
            else:
                commands.append((kind, payload))
            wake.set()

    threading.Thread(target=read, name="frames", daemon=True).start()
    files = WeightFiles(model.path, settings.dtype)  # first: a folder that is no model's is said at once
    from operators.vllm_engine import VLLMEngine  # importing vLLM takes seconds

    started = time.time()
    engine = VLLMEngine(settings, model, seed=config["seed"])
    rollouts = Rollouts(settings, run_id=config["run_id"], generator_id=config["generator_id"], engine=engine.name,
                        tokenizer=engine.tokenizer, tokenizer_digest=tokenizer_digest(model.path), stop_ids=engine.stop_ids)
    loop = EngineLoop(engine, rollouts, Loader(prepared(files, engine), (BadWeights,), wake.set), parent.send, run_id=config["run_id"],
                      generator_id=config["generator_id"], capacity=settings.batch, max_lag=config["max_lag"],
                      kv_cache_mode=settings.kv_cache_mode, rule=UpdateRule(**config["update"]), gather_s=config["gather_s"])
    parent.send(READY, json.dumps({"engine": engine.name, "seconds": time.time() - started, "pid": os.getpid()}).encode())
    while True:
        while commands:
            kind, payload = commands.popleft()
            if kind == OFFER:
                heard_at, message = unpack_offer(payload)
                for event in decode(Weights, message):
                    loop.offer(event, heard_at)
            elif kind == SERVE:
                loop.serve()
            else:
                raise ValueError(f"frame of unknown kind {kind}: operator and engine are of different versions")
        taken = 0
        while samples and (loop.hungry or taken < SAMPLES_A_TURN):
            loop.submit(*unpack_submit(samples.popleft()))
            taken += 1
        if not loop.turn() and not samples and not commands:
            wake.wait(STATS_EVERY_S)
            wake.clear()


def main() -> None:
    # The engine's core in this process: labels are exact, and nothing is left behind.
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    parent = Parent()
    try:
        run(parent)
    except BaseException:
        # Not by way of interpreter shutdown: threads of the engine could hang it, and the operator waits for this end.
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


if __name__ == "__main__":
    main()
