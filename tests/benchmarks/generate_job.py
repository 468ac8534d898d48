"""The generate job on a stack of the benchmark's own, fed and heard by the benchmark in place of loader, trainer and sequencer."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import psutil
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as Partition

from jobs.run import confluent_config
from operators.log import OwnedLog, ensure_topics, producer
from schemas.record import decode, encode
from schemas.records import Ack, Prompt, Weights, now
from schemas.settings import Settings
from schemas.topics import ACKS, PROMPTS, ROLLOUTS, WEIGHTS, topic
from tests.integration.conftest import LocalStack, stack_settings

START_S = 300.0  # job, engine and first version
POLL_S = 0.2


@contextlib.contextmanager
def local_stack() -> Iterator[LocalStack]:
    """Kafka, Flink and MLflow on free ports in a temporary folder, which goes with them."""
    from deploy.stack import Stack

    with tempfile.TemporaryDirectory(prefix="pipelinerl-benchmark-") as folder:
        runs = Path(folder) / "runs"
        runs.mkdir()
        with Stack(stack_settings(Path(folder) / "stack")).owned() as up:
            yield LocalStack(up, runs)


@dataclasses.dataclass(frozen=True, slots=True)
class Arrival:
    """A message, its records, and when it was in hand, in seconds since the epoch."""

    at: float
    value: bytes
    table: pa.Table


class Tap:
    """Every message of a topic with one partition, in a thread of its own whose fetches wait at the broker (a long poll). `rows` counts
    their records."""

    def __init__(self, settings: Settings, name: str, notice: Callable[[Arrival], None] = lambda arrival: None):
        self.arrivals: list[Arrival] = []
        self.rows = 0
        self._name, self._notice = topic(settings.run.id, name), notice
        self._config = confluent_config(settings) | {"group.id": f"{settings.run.id}.tap", "enable.auto.commit": False,
                                                     "isolation.level": "read_committed"}
        self._more, self._stop = threading.Condition(), threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
        self._thread.start()

    def wait(self, count: int, seconds: float, check: Callable[[], None] = lambda: None) -> None:
        """Until so many records have come since the tap was opened. `check` is called now and then, to raise what went wrong."""
        end = time.monotonic() + seconds
        while self.rows < count:
            with self._more:
                self._more.wait(1.0)
            if self._error is not None:
                raise RuntimeError(f"{self._name} can no longer be read") from self._error
            if time.monotonic() > end:
                raise TimeoutError(f"{self._name}: {self.rows} of {count} records within {seconds:g} s")
            check()

    def close(self) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        client = Consumer(self._config)
        try:
            client.assign([Partition(self._name, 0, 0)])
            while not self._stop.is_set():
                message = client.poll(POLL_S)
                if message is None:
                    continue
                if message.error() is not None:
                    if message.error().code() == KafkaError._PARTITION_EOF:
                        continue
                    raise KafkaException(message.error())
                at = time.time()
                arrival = Arrival(at, message.value(), pa.ipc.open_stream(message.value()).read_all())
                self.arrivals.append(arrival)
                self.rows += arrival.table.num_rows
                self._notice(arrival)
                with self._more:
                    self._more.notify_all()
        except BaseException as e:
            self._error = e
            raise
        finally:
            client.close()


class GenerateJob:
    """The job from its submission to `close`; when the constructor returns, its engine holds version 0 and serves."""

    def __init__(self, stack: LocalStack, settings: Settings, notice: Callable[[Arrival], None] = lambda arrival: None):
        from safetensors.torch import load_file

        from deploy import flink
        from operators import weights

        self.stack, self.settings, self._checked = stack, settings, 0.0
        run = settings.run.id
        ensure_topics(settings.kafka, run)
        with contextlib.ExitStack() as undo:
            self._log = OwnedLog(settings.kafka, f"{run}.trainer")
            undo.callback(self._log.close)
            self.tensors = load_file(Path(settings.model.path) / "model.safetensors")
            self.event = weights.publish(settings.weights_dir, 0, 0, self.tensors, run, settings.generation.dtype)
            self._say(self.event)
            self._prompts = producer(settings.kafka, linger_ms=20, batch_size=1 << 20)
            undo.callback(self._prompts.close)
            self.rollouts, self.acks = Tap(settings, ROLLOUTS, notice), Tap(settings, ACKS)
            undo.callback(self.rollouts.close)
            undo.callback(self.acks.close)
            self.job = flink.submit("generate", settings)
            undo.callback(flink.cancel, self.job, settings)
            self.feed([])  # nothing yet: the producer is warm
            self._undo = undo.pop_all()

    def __enter__(self) -> GenerateJob:
        return self

    def __exit__(self, *_) -> None:
        self._undo.close()

    def feed(self, prompts: Sequence[Prompt]) -> None:
        """Returns when the broker has them."""
        name = topic(self.settings.run.id, PROMPTS)
        sent = [self._prompts.send(name, key=p.group_id.encode(), value=encode([p])) for p in prompts]
        self._prompts.flush()
        for future in sent:
            future.get(timeout=self.settings.kafka.timeout_s)

    def _say(self, event: Weights) -> None:
        """A transaction, as rank 0 writes it."""
        self._log.append([(topic(self.settings.run.id, WEIGHTS), None, encode([event]))])

    def relabel(self) -> None:
        """Offer the same bytes as the next version."""
        self.event = dataclasses.replace(self.event, version=self.event.version + 1, offered_at=now())
        self._say(self.event)

    def publish(self) -> float:
        """Write the next version (`event`) to a file of its own and offer it; when its transaction was committed, in seconds since the
        epoch."""
        from operators import weights

        self.event = weights.publish(self.settings.weights_dir, 0, self.event.version + 1, self.tensors, self.settings.run.id,
                                     self.settings.generation.dtype)
        self._say(self.event)
        return time.time()

    def applied(self, version: int) -> Ack:
        """Wait until every engine has acknowledged a version; the last one's ack."""
        while True:
            acks = self.acknowledged()
            by_engine = {a.generator_id: a for a in acks if a.version == version}
            if len(by_engine) == self.settings.generation.engines:
                return list(by_engine.values())[-1]
            self.acks.wait(len(acks) + 1, START_S, self.check)

    def acknowledged(self) -> list[Ack]:
        """The acks so far. Raises with the cause if a version was not applied."""
        acks = [decode(Ack, a.value)[0] for a in self.acks.arrivals]
        if failed := [a for a in acks if a.status != "applied"]:
            raise RuntimeError(f"version {failed[0].version} was not applied: {failed[0].cause}")
        return acks

    def check(self) -> None:
        """Raises with the job's cause if it has failed once; asked at most every two seconds."""
        from deploy import flink

        if time.monotonic() - self._checked < 2.0:
            return
        self._checked = time.monotonic()
        if (cause := flink.exceptions(self.job, self.settings)) is not None:
            raise RuntimeError(f"the generate job failed:\n{cause}")

    def engine_pid(self) -> int:
        """The engine's process, under the task manager."""
        (task_manager,) = (s.pid for s in self.stack.stack.status() if s.name == "taskmanager")
        return next(p.pid for p in psutil.Process(task_manager).children(recursive=True) if p.cmdline()[-2:] == ["-m", "operators.engine"])

    def stack_pids(self) -> list[int]:
        return [s.pid for s in self.stack.stack.status() if s.pid]
