"""Training: a rank takes the micro-batches of a step, and trains when the step's manifest commits them.

Promises: a step is trained once, in order, whatever is read again after a restart; a micro-batch that no manifest names is never
trained on; a step that stalls ends the process, so that its peers fail and the job starts again from the checkpoint. The job takes no
Flink checkpoints: the trainer's own is the only cursor. This module imports no torch; `operators.trainer` does.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import pyarrow as pa
from pyflink.datastream.functions import ProcessFunction, RuntimeContext

from operators import checkpoint
from operators.control import say
from operators.lifeline import die_with_parent
from operators.log import BrokerAway, OwnedLog
from operators.publication import Publication
from schemas.record import BadRecord, decode, name_of, read
from schemas.records import Control, Manifest, Sequence, Weights
from schemas.settings import Settings

STALLED = 70  # exit status

log = logging.getLogger(__name__)


class MissingBatches(RuntimeError):
    """A manifest names what this rank does not have; the text names step and micro-batches."""


class Listener(Protocol):
    """Told by rank 0 what was trained. Its methods return at once."""

    def measures(self) -> dict[str, float]:
        """What it knows itself, for the record of the step that is about to be written."""

    def step(self, step: int, metrics: dict[str, float]) -> None: ...

    def end(self, model_folder: Path, event: Weights) -> None: ...

    def close(self) -> None: ...


@contextlib.contextmanager
def limit(seconds: float, what: str, end: Callable[[int], Any] = os._exit) -> Iterator[None]:
    """End the process if the body takes longer: a collective operation whose peer is stopped, not dead, would wait for it for hours."""

    def stalled() -> None:
        # Not by the log, whose records a process that ends at once takes with it; print is Flink's own here and knows no flush.
        os.write(2, (f"{what} takes longer than {seconds:g} s (training.stall_timeout_s): "
                     "ending this rank, so that the job starts again\n").encode())
        end(STALLED)

    timer = threading.Timer(seconds, stalled)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


class Rank:
    """The logic of a rank: messages in, steps out. `trainer` is an `operators.trainer.Trainer`; `publication` is rank 0's."""

    def __init__(self, settings: Settings, trainer: Any, rank: int, world: int, *, publication: Publication | None = None,
                 listener: Listener | None = None, clock: Callable[[], float] = time.monotonic):
        self.settings, self.trainer, self.rank, self.world = settings, trainer, rank, world
        self.publication, self.listener, self._clock = publication, listener, clock
        self.buffered: dict[tuple[int, int], pa.Table] = {}  # (step, micro-batch)
        self.ended = False
        self._saved: int | None = None  # version of the newest checkpoint

    def start(self) -> None:
        """Take up the checkpoint, if there is one, and offer its version, or version 0."""
        with limit(self.settings.training.stall_timeout_s, f"rank {self.rank}: taking up the checkpoint"):
            marker = self.trainer.restore()
            self._saved = marker.version if marker else None
            staged = self.trainer.stage_weights()
            if self.publication is not None:
                self.publication.start(self.trainer.version, staged, marker.digest if marker else None)
        self._idle_since = self._clock()

    def take(self, message: bytes) -> None:
        """A message of `batches` or `control`. Raises BadRecord if it is none of those."""
        kind = name_of(message)
        if kind == Sequence.record_name:
            table = read(Sequence, message)
            step = table.column("step")[0].as_py()
            if step > self.trainer.version:
                # A later one of the same place is a successor's: the manifest is of the newest writer.
                self.buffered[step, table.column("micro_batch")[0].as_py()] = table
        elif kind == Manifest.record_name:
            (manifest,) = decode(Manifest, message)
            if manifest.kind == "end":
                self._end(manifest)
            else:
                self._step(manifest)
        elif kind != Control.record_name:
            raise BadRecord(f"training: expected a micro-batch, a manifest or a control record, found {kind!r}")

    def _step(self, manifest: Manifest) -> None:
        trainer, step = self.trainer, manifest.step
        if step <= trainer.version:
            return  # it is in the checkpoint, and on record before that
        if step != trainer.version + 1:
            raise MissingBatches(f"rank {self.rank}: the manifest of step {step} came, but step {trainer.version + 1} is next: its batches "
                                 "are no longer in the log, or the checkpoints are of another run")
        indices = range(self.rank, len(manifest.micro_batch_offsets), self.world)
        if missing := [i for i in indices if (step, i) not in self.buffered]:
            raise MissingBatches(f"rank {self.rank}: the manifest of step {step} names {len(manifest.micro_batch_offsets)} micro-batches; "
                                 f"{missing} did not come before it")
        began = self._clock()
        with limit(self.settings.training.stall_timeout_s, f"rank {self.rank}: step {step}"):
            metrics = dict(manifest.metrics) | trainer.train(manifest, [self.buffered[step, i] for i in indices])
            metrics["train/wait_s"] = began - self._idle_since
            trained = self._clock()
            staged = trainer.stage_weights(self.publication.current if self.publication is not None else None)
            path = str(trainer.checkpoints / checkpoint.tag(step)) if trainer.due() else None
            if self.publication is not None:
                metrics |= self.listener.measures() if self.listener is not None else {}
                metrics["train/publish_s"] = self._clock() - trained
                self.publication.trained(manifest, staged, metrics, path)
            if path is not None:
                self._save()
            self._prune()
        # What lies before the manifest and is not in it has no manifest and will have none.
        self.buffered = {place: table for place, table in self.buffered.items() if place[0] > step}
        self._idle_since = self._clock()
        if self.listener is not None:
            self.listener.step(step, metrics)

    def _end(self, manifest: Manifest) -> None:
        if self.ended:
            return
        if manifest.step != self.trainer.version:
            raise MissingBatches(f"rank {self.rank}: the run ends after step {manifest.step}, but version {self.trainer.version} is held")
        with limit(self.settings.training.stall_timeout_s, f"rank {self.rank}: the final checkpoint"):
            if self._saved != self.trainer.version:
                self._save()
            self._prune()
            if self.publication is not None:
                event = self.publication.current
                folder = self.trainer.export_model(event)
                if self.listener is not None:
                    self.listener.end(folder, event)
        self.ended = True

    def _save(self) -> None:
        event = self.publication.current if self.publication is not None else None
        self.trainer.save_checkpoint(event.epoch if event else 0, event.digest if event else "")
        self._saved = self.trainer.version

    def _prune(self) -> None:
        if self.publication is not None:
            self.trainer.prune_weights(self.publication.keep(m.version for _, m in checkpoint.markers(self.trainer.checkpoints)))


class Waker:
    """Says `wake` on `control` while nothing comes to be trained: after FIRST_S, then less and less often.

    The sequencer, admission and the services sleep until a record or a timer comes, and PyFlink's checkpoints lack the timers of the
    bundle they end. A job that was restored from such a one with all its records behind it would wait for training, and training for
    it. The train job takes no checkpoints: it always begins by reading, and so it is the one to wake the others.
    """

    FIRST_S, LAST_S = 10.0, 60.0

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._moved, self._closing = threading.Event(), False
        self.thread = threading.Thread(target=self._run, name="waker", daemon=True)
        self.thread.start()

    def moved(self) -> None:
        """Something came."""
        self._moved.set()

    def close(self) -> None:
        self._closing = True
        self._moved.set()

    def _run(self) -> None:
        pause, waited = self.FIRST_S, 0.0
        while not self._closing:
            if self._moved.wait(pause):
                self._moved.clear()
                pause, waited = self.FIRST_S, 0.0
                continue
            waited += pause
            pause = min(2 * pause, self.LAST_S)
            try:
                self._say(f"nothing came to be trained for {waited:g} s")
            except BrokerAway as e:
                log.warning(f"rank 0 cannot wake the other jobs: {e}")


class RankFunction(ProcessFunction):
    """One rank a subtask: rows whose last field is a message of `batches` or `control`, those for this rank.

    Nothing is emitted: rank 0 writes to Kafka itself. `make_listener()` is called on rank 0, in the worker.
    """

    def __init__(self, settings: Settings, make_listener: Callable[[], Listener] | None = None):
        self.settings, self._make_listener = settings, make_listener

    def open(self, runtime_context: RuntimeContext) -> None:
        self._index = runtime_context.get_index_of_this_subtask()
        die_with_parent(f"rank-{self._index}", self.settings.flink.silence_timeout_s)
        self._world = runtime_context.get_number_of_parallel_subtasks()
        self._rank: Rank | None = None
        self._log: OwnedLog | None = None
        self._listener: Listener | None = None
        self._waker: Waker | None = None
        group = runtime_context.get_metrics_group().add_group("trainer")
        group.gauge("version", lambda: self._rank.trainer.version if self._rank else -1)
        group.gauge("micro_batches_buffered", lambda: len(self._rank.buffered) if self._rank else 0)

    def process_element(self, value: Any, ctx: ProcessFunction.Context) -> Iterator[Any]:
        if self._rank is None:
            self._rank = self._begin()
        self._rank.take(bytes(value[-1]))
        if self._waker is not None:
            self._waker.moved()
            if self._rank.ended:
                self._waker.close()
        return iter(())

    def close(self) -> None:
        if (rank := getattr(self, "_rank", None)) is None:
            return
        from operators.rendezvous import leave

        if self._waker is not None:
            self._waker.close()
        if self._listener is not None:
            self._listener.close()
        if self._log is not None:
            self._log.close()
        self._rank = None
        with limit(30, f"rank {rank.rank}: leaving its process group"):
            leave()

    def _begin(self) -> Rank:
        s, rank, world = self.settings, self._index, self._world
        if world != s.training.ranks:
            raise ValueError(f"the train job runs {world} ranks, training.ranks is {s.training.ranks}")
        if s.training.device == "cpu":
            os.environ["DS_ACCELERATOR"] = "cpu"  # read when DeepSpeed is imported
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
        warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")  # DeepSpeed's calls, once a tensor
        from operators import rendezvous, weights
        from operators.trainer import Trainer, device_of

        device = device_of(s)
        os.environ["DS_ACCELERATOR"] = device
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        rendezvous.leave()  # of an incarnation that this process outlived
        rendezvous.join(s, rank, world, device)
        with limit(s.training.stall_timeout_s, f"rank {rank}: loading {s.model.path}"):
            trainer = Trainer(s, rank, world)
        publication = None
        if rank == 0:
            self._log = OwnedLog(s.kafka, f"{s.run.id}.trainer")
            publication = Publication(s, self._log)
            weights.sweep(s.weights_dir)
            if self._make_listener is not None:
                self._listener = self._make_listener()
        made = Rank(s, trainer, rank, world, publication=publication, listener=self._listener)
        made.start()
        if rank == 0:
            self._waker = Waker(partial(say, s, "wake"))
        return made
