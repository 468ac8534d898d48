"""A run from its prompts to its summary: submits the three jobs, watches their topics, ends when they do.

It decides nothing: the sequencer ends a run (max_steps, end of the prompts, a stop record), this only sees it. Every wait has a
deadline and says what it waits for.
"""

from __future__ import annotations

import json
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as Partition
from kafka import TopicPartition

from jobs import report
from jobs.progress import Display, Progress
from operators.accounting import Accounts, account_topics
from operators.control import say
from operators.evaluation import Curve
from operators.log import asked, consumer, ends, ensure_topics, follow
from schemas.record import rows_of
from schemas.records import Ack, Dead, Evaluation, Manifest, Step
from schemas.settings import Settings
from schemas.topics import ACKS, ADMISSIONS, BATCHES, DEAD, EVALUATIONS, SCORED, STEPS, topic

JOBS = ("train", "generate", "preprocess")


class RunFailed(RuntimeError):
    """The run cannot go on; the text names the job or the wait, the cause and where to look."""


def begun(settings: Settings) -> bool:
    """Whether the run's topics hold admissions already."""
    client = consumer(settings.kafka)
    try:
        name = topic(settings.run.id, ADMISSIONS)
        return name in asked(client.topics) and any(ends(client, name).values())
    finally:
        client.close()


class Run:
    """One run against a broker and a Flink cluster that are up."""

    STALL_S = 1800.0  # no record on any watched topic for so long fails the run
    CLUSTER_AWAY_S = 120.0  # how long the cluster may not answer
    SAME_SIGNAL_S = 0.5  # a signal so soon after another is the same one

    def __init__(self, settings: Settings):
        self.settings = settings
        self.folder = settings.run_dir
        self.progress = Progress(max_steps=settings.run.max_steps, curve=Curve(settings.evaluation.right))
        self.jobs: dict[str, str] = {}
        self._stop_asked_at: float | None = None  # by a signal
        self._away_since: float | None = None  # since when the cluster does not answer

    def go(self, load_prompts=None, end_of_prompts: bool = True) -> dict:
        """Load the prompts by `load_prompts(settings)` if given, run to the end, return the summary. Raises RunFailed."""
        begin = time.monotonic()
        s = self.settings
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "settings.json").write_text(s.model_dump_json(indent=1))
        ensure_topics(s.kafka, s.run.id)
        with Display(self.progress) as display, ThreadPoolExecutor(len(JOBS)) as pool:
            from deploy import flink

            for job in flink.jobs(s):  # left by a command that was killed: two of a kind would fence each other in turn
                if job["name"] in [f"{s.run.id}-{name}" for name in JOBS] and job["state"] not in flink.ENDED:
                    display.say(f"job {job['name']} is still there from an earlier command: cancelling it")
                    flink.cancel(job["jid"], s)
            submitted = {name: pool.submit(flink.submit, name, s) for name in JOBS}
            if load_prompts is not None:
                loaded = load_prompts(s)
                display.say(f"prompts: {loaded.added} added, {loaded.already} there already, data set {loaded.dataset}")
            if end_of_prompts:
                say(s, "end_of_prompts", "all prompts are loaded")
            for name, future in submitted.items():
                self.jobs[name] = future.result()
                display.say(f"job {name}: {self.jobs[name]}")
            previous = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
            try:
                self._watch(display)
                accounts = self._settle(display)
            finally:
                for n, handler in previous.items():
                    signal.signal(n, handler)
                for job in self.jobs.values():
                    flink.cancel(job, s)
        return self._leave(accounts, time.monotonic() - begin)

    def _on_signal(self, number, frame) -> None:
        # No lock here, which an Event has: a signal can come while the handler of the one before still holds it. And `timeout`, make or a
        # terminal may pass one on that has come already.
        at = time.monotonic()
        if self._stop_asked_at is None:
            self._stop_asked_at = at
        elif at - self._stop_asked_at > self.SAME_SIGNAL_S:
            raise KeyboardInterrupt  # the second one does not wait

    def _watch(self, display: Display) -> None:
        s = self.settings
        client = consumer(s.kafka)
        partitions = [TopicPartition(topic(s.run.id, n), 0) for n in (STEPS, ACKS, BATCHES, EVALUATIONS, DEAD)]
        client.assign(partitions)
        client.seek_to_beginning(*partitions)
        checked, told = 0.0, False
        try:
            while not self.progress.finished:
                messages = [m.value for m in follow(client, timeout_ms=250)]
                for r in (r for cls in (Step, Ack, Manifest, Evaluation, Dead) for r in rows_of(cls, messages)):
                    self.progress.feed(r)
                    if isinstance(r, Dead) and len(self.progress.dead) <= 5:
                        display.say(f"dead letter of {r.stage}: {r.cause}")
                    if isinstance(r, Ack) and r.status == "failed":
                        display.say(f"generator {r.generator_id} could not apply version {r.version}: {r.cause}")
                display.draw()
                if self._stop_asked_at is not None and not told:
                    told = True
                    display.say("stopping: steps that are formed are still trained (again to end at once)")
                    say(s, "stop", "asked for by a signal")
                if time.monotonic() - checked > 2.0:
                    checked = time.monotonic()
                    self._check_jobs(display)
                if time.monotonic() - self.progress.last_event > self.STALL_S:
                    raise RunFailed(f"nothing has happened for {self.STALL_S:.0f} s; the run waits for {self.progress.waits_for()}. "
                                    f"Look at the logs in {s.stack.dir / 'logs'}")
        finally:
            client.close()

    def _check_jobs(self, display: Display) -> None:
        """A job that failed for good fails the run; one that went with its job manager is submitted again: the log has its state."""
        from deploy import flink, rest

        try:
            states = {name: flink.job_state(job, self.settings) for name, job in self.jobs.items()}
            for name in [n for n, state in states.items() if state == "LOST"]:
                self.jobs[name] = flink.submit(name, self.settings)
                display.say(f"job {name} was gone with its job manager; submitted again: {self.jobs[name]}")
        except (rest.Unreachable, flink.SubmitFailed) as e:
            if self._away_since is None:
                self._away_since = time.monotonic()
                display.say(f"the Flink cluster is away, waiting for it: {e}")
            if time.monotonic() - self._away_since > self.CLUSTER_AWAY_S:
                raise RunFailed(f"the Flink cluster has been away for {self.CLUSTER_AWAY_S:.0f} s: {e}") from e
            return
        self._away_since = None
        for name, state in states.items():
            if state in flink.ENDED and state != "LOST":
                raise RunFailed(f"job {name} is {state}: {flink.exceptions(self.jobs[name], self.settings) or 'no cause is known'}")

    def _settle(self, display: Display, deadline_s: float = 60.0) -> Accounts:
        """Every sample gets its outcome, and the model is written; both follow the end within moments."""
        end = time.monotonic() + deadline_s
        marker = self.folder / "model" / "pipelinerl.json"
        while True:
            accounts = account_topics(self.settings.kafka, self.settings.run.id)
            done = accounts.adds_up and not (accounts.buffered or accounts.in_flight) and marker.exists()
            if done or time.monotonic() > end:
                break
            time.sleep(0.5)
        if not marker.exists():
            raise RunFailed(f"the final model was not written to {marker.parent} within {deadline_s:.0f} s")
        if not done:
            display.say(f"accounting does not add up: {accounts.summary()}; first of {len(accounts.wrong)}: {accounts.wrong[:5]}")
        return accounts

    def _leave(self, accounts: Accounts, wall_s: float) -> dict:
        s = self.settings
        spans = report.spans_of(every_message(s, SCORED))
        made = report.summary(self.progress, accounts, spans, wall_s, None)
        path = self.folder / "summary.json"
        path.write_text(json.dumps(made, indent=1))
        title = f"run {s.run.id}: {made['steps']} steps, {made['samples_trained']} samples"
        report.plot(self.progress, self.folder / "learning.png", title)
        if s.mlflow.enabled:
            from mlflow.exceptions import MlflowException

            try:
                made["mlflow_run_id"] = report.to_mlflow(s, self.folder)
            except (MlflowException, OSError) as e:
                print(f"mlflow at {s.mlflow.uri} is away ({e}): the run's results are in {self.folder}")
            path.write_text(json.dumps(made, indent=1))
        return made


def every_message(settings: Settings, name: str):
    """Every message of a topic up to now, by the fast client."""
    full = topic(settings.run.id, name)
    client = consumer(settings.kafka)
    until = ends(client, full)
    client.close()
    fast = Consumer(confluent_config(settings) | {"group.id": f"{settings.run.id}.report", "enable.auto.commit": False,
                                                  "isolation.level": "read_committed", "enable.partition.eof": True})
    left = {tp.partition: end for tp, end in until.items() if end}
    fast.assign([Partition(full, p, 0) for p in left])
    try:
        while left:
            for m in fast.consume(1000, timeout=1.0):
                if m.error() is None:
                    yield m.value()
                elif m.error().code() == KafkaError._PARTITION_EOF:
                    left.pop(m.partition(), None)
                else:
                    raise KafkaException(m.error())
    finally:
        fast.close()


def confluent_config(settings: Settings) -> dict:
    """What every confluent-kafka client needs to reach the broker."""
    k = settings.kafka
    config = {"bootstrap.servers": k.bootstrap, "security.protocol": k.security_protocol, "fetch.message.max.bytes": k.max_message_bytes}
    if k.ssl_cafile:
        config["ssl.ca.location"] = str(k.ssl_cafile)
    if k.sasl_mechanism:
        config |= {"sasl.mechanism": k.sasl_mechanism, "sasl.username": k.sasl_username,
                   "sasl.password": Path(k.sasl_password_file).read_text().strip()}
    return config
