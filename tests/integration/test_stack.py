"""The real stack: it starts and stops, serves, listens on the loopback only, and leaves nothing behind whoever is killed."""

import contextlib
import ipaddress
import json
import os
import signal
import subprocess
import sys
import time
import uuid
import zipfile
from functools import partial
from pathlib import Path

import psutil
import pytest
from kafka import TopicPartition
from kafka.admin import KafkaAdminClient, NewTopic

from deploy import flink, rest, services
from deploy.services import ports
from deploy.stack import Stack
from deploy.supervisor import strays
from operators.log import consumer, producer
from schemas.settings import KafkaSettings
from tests.integration.conftest import LocalStack, stack_settings

ROOT = Path(__file__).parent.parent.parent


def until(condition, what: str, timeout_s: float = 90.0):
    """Poll: what another process does cannot be waited for otherwise."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for: {what}"
        time.sleep(0.05)
    return found


class StackJob:
    """A module of this folder as a job, between topics of its own."""

    module: str
    names: tuple[str, ...]

    def __init__(self, stack: LocalStack):
        name = f"{self.module}-{uuid.uuid4().hex[:8]}"
        self.settings = stack.settings(name)
        self.kafka = self.settings.kafka
        self.topics = [f"{name}.{t}" for t in self.names]
        admin = KafkaAdminClient(bootstrap_servers=self.kafka.bootstrap)
        admin.create_topics([NewTopic(t, 1, 1) for t in self.topics])
        admin.close()
        self.folder = self.settings.run_dir
        self.folder.mkdir(parents=True)
        self.archive = flink.package(self.folder / "job.zip")
        with zipfile.ZipFile(self.archive, "a") as archive:
            archive.write(Path(__file__).with_name(f"{self.module}.py"), f"{self.module}.py")
        self.id = self.submit([self.kafka.bootstrap, *self.topics])

    def submit(self, arguments: list[str], module: str | None = None, from_checkpoint: str | None = None) -> str:
        return flink.submit_module(module or self.module, self.archive, arguments, flink.address(self.settings), self.folder,
                                   from_checkpoint)

    def send(self, *values: bytes, topic: int = 0) -> None:
        client = producer(self.kafka)
        for v in values:
            client.send(self.topics[topic], v)
        client.close()

    def read(self, seconds: float) -> list[bytes]:
        """What comes to the last topic, from its beginning, within that time."""
        client, out = consumer(self.kafka), TopicPartition(self.topics[-1], 0)
        client.assign([out])
        client.seek_to_beginning(out)
        deadline, found = time.monotonic() + seconds, []
        while time.monotonic() < deadline:
            found += [r.value for records in client.poll(timeout_ms=200).values() for r in records]
        client.close()
        return found


class EchoJob(StackJob):
    module, names = "echo_job", ("in", "out")

    def answers(self, count: int) -> list[tuple[bytes, int, int]]:
        """(value, pid of the worker, pid of its child) of the first `count` different values."""
        deadline = time.monotonic() + 120
        while len(found := {v: (v, int(w), int(c)) for v, w, c in (m.split(b"|") for m in self.read(0.3))}) < count:
            assert time.monotonic() < deadline, f"{len(found)} of {count} answers; {flink.exceptions(self.id, self.settings)}"
        return list(found.values())


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# --- the session's stack


def test_up_again_changes_nothing(stack):
    before = stack.stack.status()
    assert Stack(stack.stack.settings).up(owned=False) is False
    assert [(s.name, s.state) for s in before] == [(n, "up") for n in ("kafka", "jobmanager", "taskmanager", "mlflow")]
    assert [(s.pid, s.restarts) for s in stack.stack.status()] == [(s.pid, s.restarts) for s in before]
    assert all(s.memory_mb > 50 for s in before)


def test_a_folder_of_its_own_with_every_log(stack):
    assert stack.stack.folder.stat().st_mode & 0o777 == 0o700
    logs = stack.stack.logs
    for name in ("supervisor.log", "kafka.log", "jobmanager.log", "taskmanager.log"):
        assert (logs / name).stat().st_size, name
    assert (logs / "mlflow.out").exists()


def test_the_brokers_folder_is_made_whatever_its_cluster_id_begins_with(monkeypatch, tmp_path):
    """One random id in 64 begins with a dash, which the tool took for an option."""
    monkeypatch.setattr(services.uuid, "uuid4", lambda: uuid.UUID(bytes=b"\xf8" + bytes(15)))
    (tmp_path / "kafka").mkdir()
    kafka = services.specs(stack_settings(tmp_path))[0]
    form = kafka.command[-1].split(" || exit 1;")[0]
    assert "--cluster-id=-A" in form
    done = subprocess.run(["/bin/sh", "-c", form], env=kafka.env, capture_output=True, text=True)
    assert done.returncode == 0 and (tmp_path / "kafka" / "data" / "meta.properties").exists(), done.stderr


def test_large_messages_pass_and_topics_are_made_on_purpose_only(stack):
    kafka = stack.settings("x").kafka
    name = f"large-{uuid.uuid4().hex[:8]}"
    admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
    admin.create_topics([NewTopic(name, 1, 1)])
    assert name in admin.list_topics()
    admin.close()
    value = os.urandom(20 << 20)
    writer = producer(kafka)
    writer.send(name, value).get(30)
    with pytest.raises(Exception, match=f"{name}-not|Failed to update metadata"):
        producer(KafkaSettings(bootstrap=kafka.bootstrap, timeout_s=2)).send(f"{name}-not", b"x").get(5)
    reader = consumer(kafka)
    reader.assign([TopicPartition(name, 0)])
    records = until(lambda: reader.poll(timeout_ms=500), "the large message")
    assert next(iter(records.values()))[0].value == value
    reader.close()
    writer.close()


def test_mlflow_keeps_metrics_and_artifacts(stack, tmp_path):
    import mlflow

    client = mlflow.MlflowClient(stack.stack.mlflow_uri)
    run = client.create_run(client.create_experiment(f"e-{uuid.uuid4().hex[:8]}")).info.run_id
    client.log_metric(run, "reward", 0.5, step=3)
    (tmp_path / "a.txt").write_text("kept")
    client.log_artifact(run, str(tmp_path / "a.txt"))
    client.set_terminated(run)
    assert [(m.step, m.value) for m in client.get_metric_history(run, "reward")] == [(3, 0.5)]
    assert [p.read_text() for p in (stack.stack.folder / "mlflow").rglob("a.txt")] == ["kept"]
    name = f"m-{uuid.uuid4().hex[:8]}"
    client.create_registered_model(name)
    assert client.create_model_version(name, f"runs:/{run}/a.txt", run).version in (1, "1")


def test_a_job_runs_and_ends(stack):
    job = EchoJob(stack)
    job.send(b"a", b"b")
    assert {v for v, _, _ in job.answers(2)} == {b"a", b"b"}
    assert flink.job_state(job.id, job.settings) == "RUNNING"
    assert flink.exceptions(job.id, job.settings) is None
    until(lambda: flink.checkpoints(job.id, job.settings), "a checkpoint")
    assert job.id in [j["jid"] for j in flink.jobs(job.settings)]
    _, worker, child = job.answers(1)[0]
    flink.cancel(job.id, job.settings)
    until(lambda: flink.job_state(job.id, job.settings) == "CANCELED", "the job to be cancelled")
    flink.cancel(job.id, job.settings)
    until(lambda: is_gone(worker) and is_gone(child), "the worker and its child to end with their job")
    assert flink.job_state("0" * 32, job.settings) == "LOST"
    with pytest.raises(flink.SubmitFailed, match="No module named no_such_job"):
        job.submit([], "no_such_job")


class HeldJob(StackJob):
    module, names = "held_job", ("records", "wakes", "out")

    def submit(self, arguments: list[str], module: str | None = None, from_checkpoint: str | None = None) -> str:
        return super().submit([*arguments, (self.folder / "checkpoints").as_uri()], module, from_checkpoint)


def test_what_a_restored_slot_holds_is_taken_up_though_its_timers_are_lost(stack):
    """The record's bundle ends with a checkpoint, which holds the record and, since PyFlink registers a bundle's timers behind the
    checkpoint that ends it, none of its timers."""
    job = HeldJob(stack)
    ask = partial(rest.request, flink.address(job.settings))

    def checkpoints() -> set[str]:
        return set(flink.checkpoints(job.id, job.settings))

    def running() -> bool:
        return {v["status"] for v in json.loads(ask(f"/jobs/{job.id}"))["vertices"]} == {"RUNNING"}

    until(running, "all tasks to run")
    first = until(checkpoints, "the checkpoint that Flink takes as soon as all tasks run")
    job.send(b"a")  # in the first one's bundle, its timers would be in the next
    time.sleep(3.0)  # the source has the record; no metric says so before a bundle ends
    ask(f"/jobs/{job.id}/checkpoints", "POST")
    (checkpoint,) = until(lambda: checkpoints() - first, "the checkpoint")
    flink.cancel(job.id, job.settings)
    until(lambda: flink.job_state(job.id, job.settings) == "CANCELED", "the job to be cancelled")
    job.id = job.submit([job.kafka.bootstrap, *job.topics], from_checkpoint=checkpoint)
    until(running, "all tasks to run again")
    assert job.read(6.0) == [], "if timers are restored now, operators.training.Waker has done its work"
    job.send(b"wake", topic=1)

    def answers() -> list[bytes]:
        ask(f"/jobs/{job.id}/checkpoints", "POST")  # ends the bundle
        return job.read(1.0)

    assert until(answers, "the record to be answered") == [b"1|a"], "it was in the checkpoint, and is submitted again"
    flink.cancel(job.id, job.settings)


def classes_loaded(stack) -> int:
    """Classes in the task manager, in the whole time it has been up."""
    ask = partial(rest.request, stack.stack.flink_rest)
    manager = json.loads(ask("/taskmanagers"))["taskmanagers"][0]["id"]
    name = "Status.JVM.ClassLoader.ClassesLoaded"
    found = until(lambda: json.loads(ask(f"/taskmanagers/{manager}/metrics?get={name}")), name)
    return int(found[0]["value"])


def test_jobs_load_no_classes_of_their_own(stack):
    """55 MB of metaspace a run, given back late or never, ended the task manager after five runs."""
    for _ in range(3):
        job = EchoJob(stack)
        job.send(b"a")
        job.answers(1)
        flink.cancel(job.id, job.settings)
    time.sleep(10.5)  # Flink looks at a manager's metrics every ten seconds
    assert classes_loaded(stack) < 22_000, "17,000 once for all; Beam and the connector are 9,000 more for each job that loads its own"


def test_every_socket_is_on_the_loopback(stack):
    job = EchoJob(stack)
    job.send(b"x")
    worker = job.answers(1)[0][1]
    processes = strays(stack.stack.folder)
    assert worker in [p.pid for p in processes]
    listening = {}
    for p in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            listening |= {(p.pid, c.laddr.port): c.laddr.ip for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    flink.cancel(job.id, job.settings)
    assert {port for _, port in listening} >= set(ports(stack.stack.settings).values())
    outside = {where: ip for where, ip in listening.items() if not is_loopback(ip)}
    assert not outside


def is_loopback(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


# --- stacks of their own


def pipelinerl(*arguments: str, stack: Stack) -> subprocess.CompletedProcess:
    flags = [f"stack.{k}={v}" for k, v in stack.settings.model_dump(mode="json", exclude_none=True).items()]
    return subprocess.run([sys.executable, "-m", "jobs.cli", *arguments, *flags], cwd=ROOT, capture_output=True, text=True, timeout=240)


def test_up_status_down_from_the_command_line(tmp_path):
    stack = Stack(stack_settings(tmp_path / "s"))
    try:
        assert pipelinerl("status", stack=stack).returncode == 1
        up = pipelinerl("up", stack=stack)
        assert up.returncode == 0, up.stderr
        assert all(s.state == "up" for s in stack.status())  # it outlives the command that started it
        pids = [s.pid for s in stack.status()]
        assert pipelinerl("up", stack=stack).returncode == 0
        assert [s.pid for s in stack.status()] == pids
        status = pipelinerl("status", stack=stack)
        assert status.returncode == 0
        assert all(str(pid) in status.stdout for pid in pids)
        other = Stack(stack.settings.model_copy(update={"dir": tmp_path / "other"}))
        refused = pipelinerl("up", stack=other)
        assert refused.returncode == 1
        port = stack.settings.kafka_port
        assert f"port {port} (stack.kafka_port) is taken by pid {pids[0]}, of the stack in {stack.folder}" in refused.stderr
        assert pipelinerl("down", stack=stack).returncode == 0
        assert not strays(stack.folder) and all(is_gone(pid) for pid in pids)
        assert pipelinerl("down", stack=stack).returncode == 0
        assert pipelinerl("status", stack=stack).returncode == 1
    finally:
        stack.down()


def test_kill_9_of_the_owner_leaves_nothing(tmp_path):
    settings = stack_settings(tmp_path / "s")
    code = "import sys; from deploy.stack import Stack; from schemas.settings import StackSettings\n" \
           "Stack(StackSettings.model_validate_json(sys.argv[1])).up(owned=True); print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code, settings.model_dump_json()], cwd=ROOT, stdin=subprocess.PIPE) as owner:
        state = settings.dir / "state.json"
        # In the middle of the start, which is the hardest moment.
        until(lambda: state.exists() and len(json.loads(state.read_text())["services"]) == 4, "four services to be started")
        supervisor = psutil.Process(json.loads(state.read_text())["pid"])
        assert len(strays(settings.dir)) >= 4
        owner.kill()
    until(lambda: not strays(settings.dir), "every service to be gone")
    until(lambda: is_gone(supervisor.pid), "the supervisor to be gone")
    assert {s.state for s in Stack(settings).status()} == {"down"}


def test_kill_9_of_task_manager_and_supervisor_leave_nothing(tmp_path):
    with Stack(stack_settings(tmp_path / "s")).owned() as up:
        job = EchoJob(LocalStack(up, tmp_path / "runs"))
        job.send(b"a")
        _, worker, child = job.answers(1)[0]
        manager = next(s for s in up.status() if s.name == "taskmanager")
        os.kill(manager.pid, signal.SIGKILL)
        until(lambda: is_gone(worker) and is_gone(child), "the worker and its child to be gone")
        job.send(b"b")
        _, worker, child = job.answers(2)[1]  # the task manager is back, and the job with it
        assert next(s for s in up.status() if s.name == "taskmanager").restarts == 1
        assert not is_gone(worker)

        supervisor = json.loads((up.folder / "state.json").read_text())["pid"]
        os.kill(supervisor, signal.SIGKILL)
        until(lambda: not strays(up.folder), "everything to be gone")
        assert is_gone(worker) and is_gone(child)
        assert {s.state for s in up.status()} == {"down"}


def test_a_stack_comes_back_with_its_data(tmp_path):
    """Also over a supervisor and services that were killed."""
    settings = stack_settings(tmp_path / "s")
    with Stack(settings).owned() as up:
        kafka = KafkaSettings(bootstrap=up.kafka_bootstrap)
        admin = KafkaAdminClient(bootstrap_servers=kafka.bootstrap)
        admin.create_topics([NewTopic("kept", 1, 1)])
        admin.close()
        writer = producer(kafka)
        writer.send("kept", b"value").get(10)
        writer.close()
        supervisor = json.loads((up.folder / "state.json").read_text())["pid"]
        os.kill(supervisor, signal.SIGKILL)
        until(lambda: is_gone(supervisor), "the supervisor to be gone")
        (up.folder / "torch_extensions" / "op").mkdir()
        (up.folder / "torch_extensions" / "op" / "lock").touch()
        assert up.up(owned=True) is True
        assert not list((up.folder / "torch_extensions").rglob("lock"))
        reader = consumer(kafka)
        reader.assign([TopicPartition("kept", 0)])
        records = until(lambda: reader.poll(timeout_ms=500), "the record")
        assert [r.value for rs in records.values() for r in rs] == [b"value"]
        reader.close()
