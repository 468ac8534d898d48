"""MLflow, from a thread of its own: its being slow or away never holds a step up.

What could not be logged waits in a bounded queue and is sent when the server is back; what does not fit is counted, and lies in the
`steps` topic all the same. Metrics of one step go in one request.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kafka import TopicPartition

from operators.evaluation import Curve
from operators.log import consumer, follow
from schemas.record import rows_of
from schemas.records import Ack, Evaluation, Weights
from schemas.settings import Settings
from schemas.topics import ACKS, EVALUATIONS, topic

QUEUED_STEPS = 10_000
RUN_TAG = "pipelinerl.run_id"

log = logging.getLogger(__name__)


def client(settings: Settings):
    """An MLflow client that gives up quickly: a server that is away must cost seconds, not minutes."""
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    from mlflow.tracking import MlflowClient

    logging.getLogger("mlflow.store").setLevel(logging.WARNING)  # it announces that it waits for what is there already
    return MlflowClient(settings.mlflow.uri)


def find_or_create_run(mlflow, settings: Settings) -> str:
    """The MLflow run of this pipeline run: one, however often a stage restarts."""
    experiment = mlflow.get_experiment_by_name(settings.mlflow.experiment)
    experiment_id = experiment.experiment_id if experiment else mlflow.create_experiment(settings.mlflow.experiment)
    found = mlflow.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{settings.run.id}'", max_results=1)
    if found:
        return found[0].info.run_id
    run = mlflow.create_run(experiment_id, run_name=settings.run.id, tags={RUN_TAG: settings.run.id})
    from mlflow.entities import Param

    params = [Param(k, str(v)[:500]) for k, v in flatten(settings.model_dump(mode="json")).items() if not k.endswith("password_file")]
    for i in range(0, len(params), 100):
        mlflow.log_batch(run.info.run_id, params=params[i:i + 100])
    return run.info.run_id


def flatten(tree: dict, prefix: str = "") -> dict[str, object]:
    out: dict[str, object] = {}
    for key, value in tree.items():
        out |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return out


class Tracker:
    """`log(step, metrics)` returns at once. `close()` waits a bounded time for what is queued."""

    def __init__(self, settings: Settings, connect=None):
        self._settings = settings
        self._connect = connect or self._mlflow
        self._queue: collections.deque[tuple[int, dict[str, float], int]] = collections.deque()
        self._wake = threading.Condition()
        self._closing = False
        self.dropped = 0
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)
        self._thread.start()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        with self._wake:
            if len(self._queue) >= QUEUED_STEPS:
                self._queue.popleft()
                self.dropped += 1
            self._queue.append((step, metrics, int(time.time() * 1000)))
            self._wake.notify()

    def close(self, timeout_s: float = 20.0) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)
        if self._queue or self.dropped:
            log.warning(f"mlflow: {len(self._queue) + self.dropped} steps were not logged; they are in the steps topic")

    def _mlflow(self):
        mlflow = client(self._settings)
        run_id = find_or_create_run(mlflow, self._settings)
        from mlflow.entities import Metric

        def send(step: int, metrics: dict[str, float], at_ms: int) -> None:
            mlflow.log_batch(run_id, metrics=[Metric(k, v, at_ms, step) for k, v in metrics.items()])

        return send

    def _run(self) -> None:
        send, pause = None, 1.0
        from mlflow.exceptions import MlflowException  # what the client raises, a server that is away included
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._queue or self._closing)
                if not self._queue:
                    return
                entry = self._queue[0]
            try:
                send = send or self._connect()
                send(*entry)
            except (MlflowException, OSError) as e:
                if self._closing:
                    return
                log.warning(f"mlflow at {self._settings.mlflow.uri} is away ({type(e).__name__}); "
                            f"training goes on, {len(self._queue)} steps wait")
                with self._wake:
                    self._wake.wait_for(lambda: self._closing, timeout=pause)
                pause = min(pause * 2, 30.0)
                continue
            pause = 1.0
            with self._wake:
                if self._queue and self._queue[0] is entry:
                    self._queue.popleft()


class Watch:
    """Follows a topic of the run in a thread of its own: `take(records)` gets those of class `cls`, from now on or from the beginning."""

    def __init__(self, settings: Settings, name: str, cls: type, take: Callable[[list], None], *, from_beginning: bool = False):
        self._settings, self._name, self._cls, self._take, self._from_beginning = settings, name, cls, take, from_beginning
        self._stop = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def close(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        client = consumer(self._settings.kafka)
        partition = TopicPartition(topic(self._settings.run.id, self._name), 0)
        client.assign([partition])
        (client.seek_to_beginning if self._from_beginning else client.seek_to_end)(partition)
        try:
            while not self._stop.is_set():
                self._take(list(rows_of(self._cls, [m.value for m in follow(client, timeout_ms=500)])))
        finally:
            client.close()


class Acks:
    """What generators say about updates, gathered for the trainer's step record. Its methods may be called from several threads."""

    def __init__(self):
        self._acks: dict[str, Ack] = {}
        self._fresh: list[Ack] = []
        self._lock = threading.Lock()

    def take(self, acks: list[Ack]) -> None:
        with self._lock:
            self._acks |= {a.generator_id: a for a in acks}
            self._fresh += acks

    def metrics(self) -> dict[str, float]:
        """weights/transfer_ms (until packed), weights/pause_ms (engine held), means since the last call; generation/*."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
            latest = list(self._acks.values())
        return ack_metrics(fresh, latest)


def ack_metrics(fresh: list[Ack], latest: list[Ack]) -> dict[str, float]:
    """Metrics of the acks since the last step and of each generator's newest."""
    out: dict[str, float] = {}
    applied = [dict(a.phases_ms) for a in fresh if a.status == "applied"]
    named = {"weights/transfer_ms": ("heard", "fetch", "decode", "pack"), "weights/wait_ms": ("wait",), "weights/pause_ms": ("apply",)}
    if applied:
        out = {name: sum(p.get(k, 0.0) for p in applied for k in phases) / len(applied) for name, phases in named.items()}
    if fresh:
        out["weights/failed"] = float(sum(a.status == "failed" for a in fresh))
    if latest:
        out["generation/in_flight"] = float(sum(a.in_flight for a in latest))
        out["generation/waiting"] = float(sum(a.waiting for a in latest))
        out["generation/version_spread"] = float(max(a.version for a in latest) - min(a.version for a in latest))
    return out


class RunListener:
    """Rank 0's listener (operators.training.Listener): acks into each step's measures, measures and evaluations into MLflow.

    Evaluations are read from the beginning, since a round's groups may lie on both sides of a restart: MLflow then holds a round twice.
    """

    def __init__(self, settings: Settings):
        self._acks = Acks()
        self._watches = [Watch(settings, ACKS, Ack, self._acks.take)]
        self._tracker = Tracker(settings) if settings.mlflow.enabled else None
        if self._tracker is not None and settings.evaluation.every is not None:
            self._curve = Curve(settings.evaluation.right)
            self._watches.append(Watch(settings, EVALUATIONS, Evaluation, self._evaluated, from_beginning=True))

    def _evaluated(self, records: list[Evaluation]) -> None:
        for version in self._curve.feed(records):
            self._tracker.log(version, self._curve.metrics(version))

    def measures(self) -> dict[str, float]:
        return self._acks.metrics()

    def step(self, step: int, metrics: dict[str, float]) -> None:
        if self._tracker is not None:
            self._tracker.log(step, metrics)

    def end(self, model_folder: Path, event: Weights) -> None:
        """The model goes to MLflow with the run's other results, when the run is reported."""

    def close(self) -> None:
        for watch in self._watches:
            watch.close()
        if self._tracker is not None:
            self._tracker.close()
