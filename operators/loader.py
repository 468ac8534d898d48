"""Policy versions on their way into an engine: fetched and checked by a thread while generation goes on, the file of the held one pinned.

Promises: what `Loader.take` gives has the right digest, names, shapes and dtypes; versions that are overtaken before their turn are never
read; a pinned file stays readable until `close`, and leaves nothing behind if the process is killed.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import torch

from operators import weights as files
from schemas.records import Weights


class LoadedWeights:
    """A version whose bytes are complete, checked and decoded, and a descriptor that keeps its file whatever becomes of the name.

    `tensors` are (name, tensor) pairs, read again from the file after `release`; `path` is the same file for engines whose workers are
    other processes.
    """

    def __init__(self, event: Weights, handle: int, tensors: dict[str, torch.Tensor]):
        self.event, self._handle = event, handle
        self._tensors: dict[str, torch.Tensor] | None = tensors
        self.path = files.by_handle(handle)

    @property
    def tensors(self) -> Iterable[tuple[str, torch.Tensor]]:
        if self._tensors is None:
            size = os.fstat(self._handle).st_size
            local = dataclasses.replace(self.event, uri=self.path, encoding="full", base_version=None, bytes=size)
            self._tensors = files.decode(local, files.fetch(local))
        return self._tensors.items()

    def release(self) -> None:
        """Give the memory back."""
        self._tensors = None

    def close(self) -> None:
        self.release()
        os.close(self._handle)


class WeightFiles:
    """Fetches a version and checks it against the model it is for, whose folder is read at once. Raises BadWeights."""

    def __init__(self, model: str, dtype: str):
        self._dtype = dtype
        self._expected = files.expected_tensors(model)
        try:
            config = json.loads((Path(model) / "config.json").read_text())
        except (OSError, ValueError) as e:
            raise files.BadWeights(f"{model} is no model folder: config.json cannot be read ({e})") from e
        self._held: tuple[str, int] | None = None  # digest and file of the version loaded last
        self._optional = {"lm_head.weight"} if config.get("tie_word_embeddings", False) else set()

    def load(self, event: Weights) -> tuple[LoadedWeights, dict[str, float]]:
        """The weights and {fetch, decode}: milliseconds."""
        started = time.perf_counter()
        try:
            handle, buffer = self._fetch(event)
        except OSError as e:
            raise files.BadWeights(f"version {event.version} (epoch {event.epoch}) cannot be read from {event.uri}: {e}") from e
        fetched = time.perf_counter()
        try:
            tensors = files.decode(event, buffer)
            expected = {n: shape for n, shape in self._expected.items() if n in tensors or n not in self._optional}
            offered = {n: t for n, t in tensors.items() if n in expected or n not in self._optional}
            files.check(expected, offered, self._dtype, files.where(event))
        except BaseException:
            os.close(handle)
            raise
        self._keep(event.digest, handle)
        decoded = time.perf_counter()
        return LoadedWeights(event, handle, offered), {"fetch": (fetched - started) * 1000, "decode": (decoded - fetched) * 1000}

    def _keep(self, digest: str, handle: int) -> None:
        """What the next delta is put upon."""
        if self._held is not None:
            os.close(self._held[1])
        self._held = digest, os.dup(handle)

    def _fetch(self, event: Weights) -> tuple[int, bytearray]:
        """The full bytes, and a file that has them."""
        if event.encoding == "full" and "://" not in event.uri:
            handle = os.open(event.uri, os.O_RDONLY)
            with contextlib.ExitStack() as undo:
                undo.callback(os.close, handle)
                buffer = files.fetch(event)
                undo.pop_all()
            return handle, buffer
        held = None if self._held is None else (self._held[0], lambda: files.read(files.by_handle(self._held[1])))
        buffer = files.fetch(event, held)
        with tempfile.TemporaryFile(prefix="pipelinerl-weights-") as file:  # nameless: nothing is left behind
            file.write(buffer)
            file.flush()
            return os.dup(file.fileno()), buffer


@dataclasses.dataclass
class Arrival:
    """What a loader made of an event: weights, or the cause why not. `phases_ms` has fetch and decode.

    `heard_at` is in seconds since the epoch; None if it was on offer before anybody listened.
    """

    event: Weights
    heard_at: float | None
    phases_ms: dict[str, float]
    weights: LoadedWeights | None = None
    cause: str | None = None


class Loader:
    """Fetches and checks versions in a thread of its own, the newest first; versions that were overtaken before their turn are never read.

    `load(event) -> (weights, phases_ms)` raises `refusals` for weights that cannot be used; anything else is an error of the loader and
    is raised by `take`. A refusal is told at once; since a store can be away for a moment, the version is tried again after each of
    `retry_after_s`, until it loads or a newer one is on offer.
    """

    def __init__(self, load: Callable[[Weights], tuple[LoadedWeights, dict[str, float]]], refusals: tuple[type[Exception], ...],
                 notify: Callable[[], None], *, retry_after_s: Sequence[float] = (0.5, 1.0, 2.0)):
        self._retry_after_s = retry_after_s
        self._load, self._refusals, self._notify = load, refusals, notify
        self._turn = threading.Condition()
        self._next: tuple[Weights, float | None] | None = None
        self._arrivals: collections.deque[Arrival] = collections.deque()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="weights-loader", daemon=True).start()

    def offer(self, event: Weights, heard_at: float | None) -> None:
        with self._turn:
            self._next = event, heard_at
            self._turn.notify()

    def take(self) -> Arrival | None:
        """The next version that is ready or refused."""
        if self._error is not None:
            raise RuntimeError("the weights loader broke") from self._error
        return self._arrivals.popleft() if self._arrivals else None

    def _run(self) -> None:
        try:
            while True:
                with self._turn:
                    self._turn.wait_for(lambda: self._next is not None)
                    (event, heard_at), self._next = self._next, None
                arrival = self._try(event, heard_at)
                self._give(arrival)
                for pause in self._retry_after_s if arrival.cause is not None else ():
                    with self._turn:
                        if self._turn.wait_for(lambda: self._next is not None, pause):
                            break  # a newer version is on offer
                    if (again := self._try(event, heard_at)).cause is None:
                        self._give(again)
                        break
        except BaseException as e:
            self._error = e
            self._notify()
            raise

    def _try(self, event: Weights, heard_at: float | None) -> Arrival:
        try:
            weights, phases = self._load(event)
        except self._refusals as e:
            return Arrival(event, heard_at, {}, cause=str(e))
        return Arrival(event, heard_at, phases, weights)

    def _give(self, arrival: Arrival) -> None:
        self._arrivals.append(arrival)
        self._notify()
