"""Generation: an engine in a child process, its prompts in keyed state, its weights heard by a thread of its own.

Promises: every dispatch is answered by a rollout, also if the engine dies under it; a fresh engine serves nothing before it holds the
newest version on offer; whoever cannot go on (the engine, the weights listener, the acks' writer) makes the job fail with its cause at
the next tick. Slots are refilled by the engine's own loop (`operators.engine`), never by Flink's timers, which would starve it.

`EngineService` decides what to do on frames and deaths; it knows neither Flink's threads nor Kafka, and starts children through a callable.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from pyflink.common import Row

from operators.child import Child, ChildDied, QueuedChild
from operators.dead import DeadLetters
from operators.engine_frames import ACK, OFFER, READY, RESULT, SERVE, STATS, SUBMIT, WRITING, pack_offer, pack_submit, unpack_result
from operators.log import Writer, consumer, follow, read_with, wait_for_topic
from operators.offload import Offload, Runtime
from schemas.record import BadRecord, decode, encode
from schemas.records import Ack, Weights
from schemas.settings import Settings
from schemas.topics import ACKS, WEIGHTS, topic

POLL_MS = 100
GAUGES = ("in_flight", "waiting", "held_version", "generated_tokens")

log = logging.getLogger(__name__)


class GenerationFailed(RuntimeError):
    """Generation cannot go on; the text says what broke and why."""


class Process(Protocol):
    """What the service needs of a child: see operators.child.Child."""

    def send(self, kind: int, payload: bytes) -> None: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


#: (restarts so far, on_frame(kind, payload), on_death(cause)) -> a running child
Start = Callable[[int, Callable[[int, bytes], None], Callable[[str], None]], Process]


class EngineService:
    """`operators.offload.Service` around one engine. Methods may be called from Flink's, the child's and the listener's threads.

    `say(ack)` takes the encoded acks. An engine that dies or hangs is replaced at once and gets every open record again, one attempt
    higher; more than `max_restarts` within `restart_window_s` end the service with the cause. One that is silent for `silence_s`, or
    pauses its sequences for longer than `pause_s` to write a version, hangs.
    """

    def __init__(self, start: Start, say: Callable[[bytes], None], *, max_restarts: int, restart_window_s: float, start_timeout_s: float,
                 silence_s: float = 300.0, pause_s: float = 60.0, clock: Callable[[], float] = time.monotonic):
        self._start_child, self._say, self._clock = start, say, clock
        self._max_restarts, self._window, self._start_timeout = max_restarts, restart_window_s, start_timeout_s
        self._silence, self._pause = silence_s, pause_s
        self._lock = threading.RLock()
        self._open: dict[str, tuple[bytes, int]] = {}  # ident -> record, attempt
        self._done: collections.deque[tuple[str, list]] = collections.deque()
        self._newest: tuple[tuple[int, int], bytes] | None = None  # ((epoch, version), offer frame)
        self._caught_up = self._ready = self._held = self._closing = False
        self._deaths: list[float] = []
        self._restarts = 0
        self._failure: str | None = None
        self._refused: str | None = None  # why the last version was not applied
        self._stats: dict[str, int] = {"held_version": -1}
        self._resources = contextlib.ExitStack()
        with self._lock:
            self._spawn()

    # --- Flink's thread

    def submit(self, ident: str, record: bytes, attempt: int) -> None:
        with self._lock:
            self._open[ident] = record, attempt
            self._send(SUBMIT, pack_submit(ident, attempt, record))

    def drain(self) -> list[tuple[str, list]]:
        done = []
        while self._done:
            done.append(self._done.popleft())
        return done

    def poll(self) -> None:
        """Raises GenerationFailed."""
        with self._lock:
            if self._failure is None and self._deadline is not None and self._clock() > self._deadline:
                what = "holds no version of those on offer" if self._ready else "has not loaded"
                why = f"; the last one was refused: {self._refused}" if self._refused else ""
                self._failure = f"the engine {what} within {self._start_timeout:g} s (generation.start_timeout_s){why}"
            if self._failure is not None:
                raise GenerationFailed(self._failure)
            if self._ready and self._clock() - self._heard_at > self._silence:  # it says its measures every few seconds
                self._heard_at = self._clock()
                log.warning(f"generation: the engine has said nothing for {self._silence:g} s and is killed")
                self._child.kill()
            if self._writing is not None and self._clock() - self._writing[1] > self._pause:
                version, self._writing = self._writing[0], None
                log.warning(f"generation: the engine has been writing version {version} for more than {self._pause:g} s "
                            "(weights.pause_timeout_s), while its sequences wait, and is killed")
                self._child.kill()

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._child.close()
        self._resources.close()

    def gauge(self, name: str) -> int:
        return self._stats.get(name, 0)

    def on_close(self, callback: Callable[[], None]) -> None:
        """Called by `close`, the last one first."""
        self._resources.callback(callback)

    # --- the listener's thread

    def offer(self, event: Weights, heard_at: float) -> None:
        """A version is on offer. A fresh engine gets the newest one only."""
        key = event.epoch, event.version
        frame = pack_offer(heard_at, encode([event]))
        with self._lock:
            if self._newest is None or key >= self._newest[0]:
                self._newest = key, frame
            self._send(OFFER, frame)
            self._wait_for_first_version()

    def caught_up(self) -> None:
        """All that was on offer when the operator opened has been offered: the engine may serve when it holds the newest of it."""
        with self._lock:
            if not self._caught_up:
                self._caught_up = True
                self._send(SERVE, b"")

    def fail(self, cause: str) -> None:
        """A thread the service cannot do without has broken."""
        with self._lock:
            self._failure = self._failure or cause

    # --- the child's threads

    def _on_frame(self, kind: int, payload: bytes) -> None:
        self._heard_at = self._clock()
        if kind == RESULT:
            idents, group_id, rollouts = unpack_result(payload)
            with self._lock:
                answered = [i for i in idents if self._open.pop(i, None) is not None]
                # One message answers them all: it goes with the first, which is drained before the others.
                self._done.extend((ident, [] if n else [Row(group_id, rollouts)]) for n, ident in enumerate(answered))
        elif kind == ACK:
            (ack,) = decode(Ack, payload)
            with self._lock:
                self._writing = None
                if ack.status == "applied":
                    self._held, self._deadline = True, None
                else:
                    self._refused = ack.cause
            self._say(payload)
        elif kind == STATS:
            self._stats = json.loads(payload)
        elif kind == WRITING:
            with self._lock:
                self._writing = payload.decode(), self._clock()
        elif kind == READY:
            with self._lock:
                self._ready = True
                self._deadline = None
                self._wait_for_first_version()
        else:
            self.fail(f"the engine sent a frame of unknown kind {kind}: operator and engine are of different versions")

    def _on_death(self, cause: str) -> None:
        with self._lock:
            if self._closing or self._failure is not None:
                return
            at = self._clock()
            self._deaths = [t for t in self._deaths if at - t < self._window] + [at]
            if len(self._deaths) > self._max_restarts:
                self._failure = (f"the engine died {len(self._deaths)} times within {self._window:g} s, more than generation.max_restarts "
                                 f"({self._max_restarts}) allows; the last time: {cause}")
                return
            log.warning(f"generation: {cause}; another engine is started for {len(self._open)} open samples")
            self._restarts += 1
            self._open = {ident: (record, attempt + 1) for ident, (record, attempt) in self._open.items()}
            self._child.close()
            self._spawn()

    # --- with the lock held

    def _spawn(self) -> None:
        self._ready = self._held = False
        self._refused = None
        self._writing: tuple[str, float] | None = None  # a version, since when
        self._heard_at = self._clock()
        self._deadline: float | None = self._heard_at + self._start_timeout
        self._child = self._start_child(self._restarts, self._on_frame, self._on_death)
        if self._newest is not None:
            self._send(OFFER, self._newest[1])
        if self._caught_up:
            self._send(SERVE, b"")
        for ident, (record, attempt) in self._open.items():
            self._send(SUBMIT, pack_submit(ident, attempt, record))

    def _send(self, kind: int, payload: bytes) -> None:
        # A dead child is reported by _on_death, and its successor gets everything again.
        with contextlib.suppress(ChildDied):
            self._child.send(kind, payload)

    def _wait_for_first_version(self) -> None:
        """Loading may take start_timeout_s, and so may the first version once there is one on offer."""
        if self._ready and not self._held and (self._newest is not None) and self._deadline is None:
            self._deadline = self._clock() + self._start_timeout


class WeightsListener:
    """Hears weight events in a thread of its own, whatever the operator's back-pressure, and hands them to a service."""

    def __init__(self, settings: Settings, service: EngineService):
        self._kafka, self._topic, self._service = settings.kafka, topic(settings.run.id, WEIGHTS), service
        self._dead = DeadLetters(settings.kafka, settings.run.id, "generation", self._topic)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(2.0)

    def _run(self) -> None:
        try:
            self._listen()
        except BaseException as e:
            self._service.fail(f"the weights listener on {self._topic} broke: {type(e).__name__}: {e}")
            raise

    def _listen(self) -> None:
        wait_for_topic(self._kafka, self._topic)
        client = consumer(self._kafka)
        with contextlib.closing(client):
            offered: list[Weights] = []
            read_to = 0
            for message in read_with(client, self._topic):
                offered = sorted(offered + self._events(message.value), key=lambda w: (w.epoch, w.version))[-1:]
                read_to = message.offset + 1
            for event in offered:
                self._service.offer(event, time.time())
            self._service.caught_up()
            for partition in client.assignment():  # `read_with` stops at the end it saw, but may have fetched further
                client.seek(partition, read_to)
            while not self._stop.is_set():
                for message in follow(client, POLL_MS):
                    heard_at = time.time()
                    for event in self._events(message.value):
                        self._service.offer(event, heard_at)

    def _events(self, message: bytes) -> list[Weights]:
        try:
            return decode(Weights, message)
        except BadRecord as e:
            self._dead(str(e), message)
            return []


class AckWriter:
    """Writes acks to Kafka in a thread of its own: they come from the child's reader, which must not wait for a broker."""

    def __init__(self, settings: Settings, acks: queue.SimpleQueue[bytes | None], service: EngineService):
        self._settings, self._acks, self._service = settings, acks, service
        self._thread = threading.Thread(target=self._run, name="acks", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._acks.put(None)
        self._thread.join(2.0)

    def _run(self) -> None:
        name = topic(self._settings.run.id, ACKS)
        try:
            writer = Writer(self._settings.kafka)
            while (ack := self._acks.get()) is not None:
                writer.write(name, ack)
            writer.close()
        except BaseException as e:
            self._service.fail(f"acks cannot be written to {name}: {type(e).__name__}: {e}")
            raise


def generation(settings: Settings) -> Offload:
    """The operator. Takes dispatches keyed by a slot; gives rows (group id, rollout) as bytes."""
    return Offload(functools.partial(make_service, settings), tick_ms=settings.flink.tick_ms, name="generate",
                   silence_s=settings.flink.silence_timeout_s)


def make_service(settings: Settings, runtime: Runtime) -> EngineService:
    """An engine in a child process, its listener and its acks' writer."""
    g = settings.generation
    start = functools.partial(start_engine, settings, f"generator-{runtime.subtask}", runtime.subtask, runtime.attempt)
    acks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    service = EngineService(start, acks.put, max_restarts=g.max_restarts, restart_window_s=g.restart_window_s,
                            start_timeout_s=g.start_timeout_s, silence_s=settings.flink.silence_timeout_s,
                            pause_s=settings.weights.pause_timeout_s)
    service.on_close(AckWriter(settings, acks, service).close)
    service.on_close(WeightsListener(settings, service).close)
    for name in GAUGES:
        runtime.gauge(name, functools.partial(service.gauge, name))
    return service


def start_engine(settings: Settings, generator_id: str, subtask: int, attempt: int, restarts: int,
                 on_frame: Callable[[int, bytes], None], on_death: Callable[[str], None]) -> QueuedChild:
    """Start `python -m operators.engine` for one subtask."""
    return QueuedChild(Child("operators.engine", engine_config(settings, generator_id, f"{attempt}.{restarts}"),
                             on_frame=on_frame, on_death=on_death, env=engine_env(settings, subtask)))


def engine_config(settings: Settings, generator_id: str, incarnation: str = "0") -> dict[str, Any]:
    """The child's configuration. The seed differs between engines and incarnations: equal ones would sample equal groups."""
    count, unit = settings.weights.rule
    seed = hashlib.sha256(f"{settings.run.seed}/{settings.run.id}/{generator_id}/{incarnation}".encode()).digest()
    return {
        "run_id": settings.run.id, "generator_id": generator_id, "model": settings.model.model_dump(),
        "max_lag": settings.training.max_lag,
        "gather_s": settings.flink.tick_ms / 1000, "update": {"count": count, "unit": unit, "chunk": settings.weights.chunked_generation},
        "generation": settings.generation.model_dump(mode="json"), "seed": int.from_bytes(seed[:4], "little"),
    }


def engine_env(settings: Settings, subtask: int) -> dict[str, str]:
    """The child's environment beyond this process's own."""
    g = settings.generation
    env = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine's core in the child itself
        "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(g.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # engines, graders and ranks share the cores
    }
    if g.enforce_eager:
        env["TORCH_COMPILE_DISABLE"] = "1"  # a 22 s stall at the first request otherwise
    if g.device != "cpu":
        wanted = range(subtask * g.tensor_parallel, (subtask + 1) * g.tensor_parallel)
        if visible := [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(visible[i % len(visible)] for i in wanted)
        else:
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, wanted))
    return env
