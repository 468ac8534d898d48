"""Reference: log-probabilities of sampled tokens under a fixed model, by the trainer's own forward pass.

Promises: every record comes out once, with `ref_logprobs` at each row's temperature and the model's name, or goes to the dead letters
with its cause; the model lives in a child process, is loaded once, and scores what is waiting together. A child that dies is replaced and
gets every open record again, and one that is silent while records wait is killed; more than `MAX_RESTARTS` deaths within
`RESTART_WINDOW_S` make the job fail with the cause.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from operators.child import Child, ChildDied, QueuedChild
from operators.reference_frames import READY, REFUSED, SCORE, SCORED, pack_record, unpack_record
from schemas.settings import Settings
from schemas.topics import ROLLOUTS, topic

MAX_RESTARTS, RESTART_WINDOW_S = 3, 600.0
LOAD_TIMEOUT_S = 900.0

log = logging.getLogger(__name__)


class ReferenceFailed(RuntimeError):
    """The reference model cannot be used; the text says why."""


class ReferenceService:
    """`operators.offload.Service` around one reference child.

    `start(on_frame, on_death)` makes a running child (`send`, `close`); `dead(cause, record)` takes what cannot be scored.
    """

    def __init__(self, start: Callable[..., Any], dead: Callable[[str, bytes], None], *, silence_s: float = 300.0,
                 clock: Callable[[], float] = time.monotonic):
        self._start_child, self._dead, self._silence, self._clock = start, dead, silence_s, clock
        self._lock = threading.RLock()
        self._open: dict[str, bytes] = {}
        self._done: collections.deque[tuple[str, list[bytes]]] = collections.deque()
        self._refused: collections.deque[tuple[str, bytes]] = collections.deque()
        self._deaths: list[float] = []
        self._failure: str | None = None
        self._closing = False
        with self._lock:
            self._spawn()

    @property
    def depth(self) -> int:
        """Records taken and not yet answered."""
        return len(self._open)

    def submit(self, ident: str, record: bytes, attempt: int) -> None:
        with self._lock:
            if not self._open:
                self._heard_at = self._clock()
            self._open[ident] = record
            self._send(ident, record)

    def drain(self) -> list[tuple[str, list[bytes]]]:
        """(ident, [record with its reference log-probabilities]); no record for one that is dead."""
        while self._refused:
            self._dead(*self._refused.popleft())
        return [self._done.popleft() for _ in range(len(self._done))]

    def poll(self) -> None:
        """Raises ReferenceFailed."""
        with self._lock:
            if self._loading_since is not None and self._clock() - self._loading_since > LOAD_TIMEOUT_S:
                self._failure = self._failure or f"the reference model is not loaded after {LOAD_TIMEOUT_S:g} s"
            if self._failure is not None:
                raise ReferenceFailed(self._failure)
            if self._loading_since is None and self._open and self._clock() - self._heard_at > self._silence:
                self._heard_at = self._clock()
                log.warning(f"reference: nothing for {self._silence:g} s while {len(self._open)} records wait: the process is killed")
                self._child.kill()

    def close(self) -> None:
        with self._lock:
            self._closing = True
        self._child.close()

    def _on_frame(self, kind: int, payload: bytes) -> None:
        with self._lock:
            self._heard_at = self._clock()
            if kind == READY:
                self._loading_since = None
                log.info(f"reference model {payload.decode()} is loaded")
                return
            name, content = unpack_record(payload)
            if kind == REFUSED:
                self._refused.append((f"reference cannot score a rollout: {name}", content))
            elif kind == SCORED and self._open.pop(name, None) is not None:  # else answered by the child that died
                self._done.append((name, [content] if content else []))

    def _on_death(self, cause: str) -> None:
        with self._lock:
            if self._closing or self._failure is not None:
                return
            at = self._clock()
            self._deaths = [t for t in self._deaths if at - t < RESTART_WINDOW_S] + [at]
            if len(self._deaths) > MAX_RESTARTS:
                self._failure = (f"the reference process died {len(self._deaths)} times within {RESTART_WINDOW_S:g} s; "
                                 f"the last time: {cause}")
                return
            log.warning(f"reference: {cause}; another process is started for {len(self._open)} open records")
            self._child.close()
            self._spawn()

    def _spawn(self) -> None:
        self._loading_since: float | None = self._clock()
        self._heard_at = self._clock()
        self._child = self._start_child(self._on_frame, self._on_death)
        for ident, record in self._open.items():
            self._send(ident, record)

    def _send(self, ident: str, record: bytes) -> None:
        # A dead child is reported by _on_death, and its successor gets everything again.
        with contextlib.suppress(ChildDied):
            self._child.send(SCORE, pack_record(ident, record))


def child_config(settings: Settings) -> dict[str, Any]:
    """What `operators.reference_child` is started with."""
    r, t = settings.reference, settings.training
    device = t.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    model = settings.model.model_copy(update={"path": settings.reference_path})
    return {"model": model.model_dump(), "dtype": r.dtype, "attention": t.attention, "token_budget": r.token_budget, "device": device,
            "threads": r.threads}


def start_child(settings: Settings, on_frame: Callable[[int, bytes], None], on_death: Callable[[str], None]) -> QueuedChild:
    """Start `python -m operators.reference_child`."""
    threads = str(settings.reference.threads)
    return QueuedChild(Child("operators.reference_child", child_config(settings), on_frame=on_frame, on_death=on_death,
                             env={"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "TOKENIZERS_PARALLELISM": "false",
                                  "HF_HUB_OFFLINE": "1"}))


def reference(settings: Settings):
    """The reference operator: scored rollout messages in, the same with reference log-probabilities out."""
    from operators.dead import DeadLetters
    from operators.offload import Offload

    def make(runtime) -> ReferenceService:
        dead = DeadLetters(settings.kafka, settings.run.id, "reference", topic(settings.run.id, ROLLOUTS))
        service = ReferenceService(lambda on_frame, on_death: start_child(settings, on_frame, on_death), dead,
                                   silence_s=settings.flink.silence_timeout_s)
        runtime.gauge("reference_in_flight", lambda: service.depth)
        return service

    return Offload(make, tick_ms=settings.flink.tick_ms, name="preprocess", silence_s=settings.flink.silence_timeout_s)
