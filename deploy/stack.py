"""The local stack as its user sees it: a broker, a Flink cluster and an MLflow server, started and stopped by one call.

    with Stack(settings.stack).borrowed_or_owned() as stack: ...   # the one that is up, or one that ends with this process

Its services belong to a supervisor (deploy/supervisor.py), never to the process that asked for them. Up when it is up already and
down when it is down already are no errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import psutil

from deploy.jars import connector_jar, kafka_jars
from deploy.services import HOST, MARKER, ports, with_bytecode
from deploy.supervisor import GRACE_S, STATE, command_line, hold, kill_strays
from schemas.settings import StackSettings


class StackError(RuntimeError):
    """The stack cannot be started or stopped; the text names the service and has the last lines of its log."""


@dataclasses.dataclass(frozen=True)
class Service:
    """A row of `pipelinerl status`. `memory_mb`: resident memory of the process and everything below it."""

    name: str
    state: str  # up, starting, failed, down
    pid: int | None
    port: int
    memory_mb: float
    since: datetime | None
    restarts: int


class Stack:
    def __init__(self, settings: StackSettings):
        self.settings = settings.model_copy(update={"dir": settings.dir.absolute()})
        self.folder = self.settings.dir
        self.logs = self.folder / "logs"
        self._supervisor: subprocess.Popen | None = None

    @property
    def kafka_bootstrap(self) -> str:
        return f"{HOST}:{self.settings.kafka_port}"

    @property
    def flink_rest(self) -> str:
        return f"{HOST}:{self.settings.flink_rest_port}"

    @property
    def mlflow_uri(self) -> str:
        return f"http://{HOST}:{self.settings.mlflow_port}"

    def up(self, *, owned: bool) -> bool:
        """Start what is not up and return when all of it answers; whether it was this call that started it.

        An owned stack ends with this process, however that ends; otherwise it stays until `down`. Raises StackError, and
        deploy.jars.JarsAway the first time on a machine that cannot reach Maven Central.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        self.logs.mkdir(exist_ok=True)
        while self.is_held() and self._is_abandoned():
            time.sleep(0.02)
        started = not self.is_held()
        if started:
            self._refuse_taken_ports()
            kafka_jars()  # here rather than in the supervisor: the first time takes half a minute and may fail
            connector_jar()
            (self.folder / STATE).unlink(missing_ok=True)
            with (self.logs / "supervisor.log").open("ab") as log:
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-m", "deploy.supervisor", self.settings.model_dump_json(), str(os.getpid() if owned else 0)],
                    cwd=Path(__file__).resolve().parent.parent,  # where `deploy` is found
                    env=with_bytecode(dict(os.environ)),
                    stdin=subprocess.PIPE if owned else subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        self._wait_until_up()
        return started

    def down(self) -> None:
        """Stop everything and return when it is gone. Raises StackError if the supervisor does not end."""
        state = self._state()
        if self.is_held() and state is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(state["pid"], signal.SIGTERM)
            deadline = time.monotonic() + sum(GRACE_S.values())
            while self.is_held():
                if time.monotonic() > deadline:
                    raise StackError(f"the supervisor (pid {state['pid']}) does not end; see {self.logs / 'supervisor.log'}")
                time.sleep(0.02)
        if self._supervisor is not None:
            self._supervisor.wait()
            if self._supervisor.stdin:
                self._supervisor.stdin.close()
            self._supervisor = None
        elif self.folder.is_dir():
            kill_strays(self.folder)  # a supervisor that was killed could not

    def status(self) -> list[Service]:
        """Every service of the stack, also those that are down."""
        state = self._state() if self.is_held() and not self._is_abandoned() else None
        known = {s["name"]: s for s in state["services"]} if state else {}
        numbers = ports(self.settings)
        rows = {"kafka": numbers["kafka_port"], "jobmanager": numbers["flink_rest_port"], "taskmanager": numbers["flink_rpc_port"],
                "mlflow": numbers["mlflow_port"]}
        return [self._service(name, port, known.get(name)) for name, port in rows.items()]

    @contextlib.contextmanager
    def owned(self) -> Iterator[Stack]:
        """A stack of this process's own. Raises StackError, also if one is up in the folder already."""
        if self.is_held():
            raise StackError(f"a stack is up in {self.folder} already: `pipelinerl down --stack.dir {self.folder}` stops it")
        with self.borrowed_or_owned():
            yield self

    @contextlib.contextmanager
    def borrowed_or_owned(self) -> Iterator[Stack]:
        """The stack that is up, left as it is; or one of this process's own. Raises StackError."""
        try:
            started = self.up(owned=True)
        except BaseException:
            if self._supervisor is not None:  # an interrupt leaves nothing half-started, and a stack of others alone
                self.down()
            raise
        try:
            yield self
        finally:
            if started:
                self.down()

    def _service(self, name: str, port: int, known: dict | None) -> Service:
        if known is None:
            return Service(name, "down", None, port, 0.0, None, 0)
        try:
            process = psutil.Process(known["pid"])
            memory = sum(p.memory_info().rss for p in [process, *process.children(recursive=True)]) / 2**20
        except psutil.NoSuchProcess:
            memory = 0.0  # it ended a moment ago
        return Service(name, known["state"], known["pid"], known["port"], memory, datetime.fromtimestamp(known["since"]), known["restarts"])

    def is_held(self) -> bool:
        """A supervisor lives: the stack is up, starting or stopping."""
        if not self.folder.is_dir():
            return False
        fd = hold(self.folder)
        if fd is not None:
            os.close(fd)
        return fd is None

    def _is_abandoned(self) -> bool:
        """Whether the supervisor was killed: the lock is held by its guard, for a moment, until the folder is clean."""
        state = self._state()
        if state is None:
            return False
        try:
            return psutil.Process(state["pid"]).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def _state(self) -> dict | None:
        try:
            return json.loads((self.folder / STATE).read_text())
        except FileNotFoundError:
            return None

    def _wait_until_up(self) -> None:
        while True:
            state = self._state()
            held = self.is_held()
            if held and state and (differ := _difference(state["settings"], self.settings.model_dump(mode="json"))):
                raise StackError(f"the stack in {self.folder} is up with other settings ({differ}): `pipelinerl down` stops it")
            if held and state and state["phase"] == "up":
                failed = [s["name"] for s in state["services"] if s["state"] == "failed"]
                if failed:
                    raise StackError(f"{', '.join(failed)} of the stack in {self.folder} failed for good, see {self.logs}: "
                                     "`pipelinerl down`, then `up` again")
                return
            if state and state["phase"] == "failed":
                raise StackError(f"the stack could not be started: {state['error']}")
            if not held and (self._supervisor is None or self._supervisor.poll() is not None):
                log = self.logs / "supervisor.log"
                raise StackError(f"the supervisor ended; the last lines of {log}:\n" + "\n".join(log.read_text().splitlines()[-15:]))
            time.sleep(0.02)

    def _refuse_taken_ports(self) -> None:
        wanted = ports(self.settings)
        deadline = time.monotonic() + 5.0
        while any(_is_taken(p) and _listener(p) is None for p in wanted.values()) and time.monotonic() < deadline:
            time.sleep(0.05)  # a process that was just killed is no process any more, but its sockets may live a moment longer
        taken = [f"port {port} (stack.{name}) is taken by {_listener(port) or 'a process of another user'}"
                 for name, port in wanted.items() if _is_taken(port)]
        numbers = list(wanted.values())
        taken += [f"port {p} is given to more than one of {', '.join(wanted)}" for p in sorted(set(numbers)) if numbers.count(p) > 1]
        if taken:
            raise StackError("\n".join(taken) + "\nstop it, or give the stack another port; nothing was started")


def _difference(has: dict, wanted: dict) -> str:
    return ", ".join(f"stack.{k} is {has.get(k)}, not {v}" for k, v in wanted.items() if has.get(k) != v)


def _is_taken(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that linger are no owner
        try:
            probe.bind((HOST, port))
        except OSError:
            return True
    return False


def _listener(port: int) -> str | None:
    """Who listens on a port, for a person; None if that cannot be seen."""
    for c in psutil.net_connections("tcp"):
        if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(c.pid)
                with contextlib.suppress(psutil.AccessDenied):
                    if folder := process.environ().get(MARKER):
                        return f"pid {c.pid}, of the stack in {folder} (`pipelinerl down --stack.dir {folder}` stops it)"
                return f"pid {c.pid}: {command_line(process)}"
    return None


def table(services: list[Service]) -> str:
    """The services as text for a terminal."""
    head = ("service", "state", "pid", "port", "memory", "since", "restarts")
    rows = [(s.name, s.state, str(s.pid or "-"), str(s.port), f"{s.memory_mb:.0f} MB" if s.pid else "-",
             f"{s.since:%Y-%m-%d %H:%M:%S}" if s.since else "-", str(s.restarts)) for s in services]
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(r, widths, strict=True)).rstrip() for r in [head, *rows])
