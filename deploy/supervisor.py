"""The process that owns the local stack: `python -m deploy.supervisor SETTINGS_JSON OWNER_PID`.

It promises that nothing outlives it. The services die with it, also when it is killed (parent-death signal); what a killed service
leaves behind falls to it (child subreaper) and is killed; what it leaves behind itself, a guard kills; and it ends itself when its
owner does, whose end it sees in the end of its standard input and in its parent's pid. A service that ends is started again, at most
MAX_RESTARTS times in RESTART_WINDOW_S.

It holds a lock on the stack's folder while it lives and says in `state.json` what it knows; both are all that others see of it.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import fcntl
import json
import logging
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from deploy.services import MARKER, Spec, specs
from schemas.settings import StackSettings

log = logging.getLogger("supervisor")

MAX_RESTARTS = 5
RESTART_WINDOW_S = 600.0
START_TIMEOUT_S = 180.0
#: How long services may take to close: the task manager first, while its workers can still reach the broker.
GRACE_S = {"taskmanager": 5.0, "jobmanager": 10.0, "kafka": 10.0, "mlflow": 3.0}
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LOCK, STATE = "lock", "state.json"

_libc = ctypes.CDLL(None, use_errno=True)


@dataclasses.dataclass
class Running:
    """A service and what became of it so far. Times are seconds since the epoch."""

    spec: Spec
    process: subprocess.Popen | None = None
    state: str = "starting"  # starting, up, failed
    since: float = 0.0
    ends: collections.deque = dataclasses.field(default_factory=collections.deque)

    def public(self) -> dict:
        return {"name": self.spec.name, "state": self.state, "pid": self.process.pid, "port": self.spec.port, "since": self.since,
                "restarts": len(self.ends)}


class Failed(RuntimeError):
    """A service could not be started; the text names it and has the last lines of its log."""


class Supervisor:
    def __init__(self, settings: StackSettings, owner: int | None):
        self.settings, self.owner = settings, owner
        self._guard = guard(settings.dir)
        self.services: list[Running] = []
        self.phase = "starting"
        self.error: str | None = None
        self._stopping = False
        self._wake, write = os.pipe()
        for fd in (self._wake, write):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(write)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # only to wake up

    def run(self) -> int:
        _libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        try:
            self._write_state()
            kill_strays(self.settings.dir)
            for stale in (self.settings.dir / "torch_extensions").rglob("lock"):
                stale.unlink()  # of a compile that was killed; the next one would wait for it
            for spec in specs(self.settings):
                self.services.append(Running(spec))
                self._start(self.services[-1])
            self._until_up()
            while not self._stopping:
                self._step(0.1 if any(s.state == "starting" for s in self.services) else 1.0)
        except (Failed, OSError, ValueError) as e:  # ValueError: settings that cannot be; OSError: no jars, no space
            log.error("%s", e)
            self.error, self.phase = str(e), "failed"
        finally:
            self._stop()
        return 1 if self.error else 0

    def _until_up(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._stopping and not all(s.state == "up" for s in self.services):
            self._step(0.05)
            for s in self.services:
                if s.ends:
                    raise Failed(f"{s.spec.name} {s.ends[-1][1]} while the stack started\n{last_lines(s.spec)}")
            if time.monotonic() > deadline:
                late = [s for s in self.services if s.state != "up"]
                raise Failed(f"not ready after {START_TIMEOUT_S:.0f} s: {', '.join(s.spec.name for s in late)}\n{last_lines(late[0].spec)}")
        if not self._stopping:
            self.phase = "up"
            log.info("up")
            self._write_state()

    def _step(self, timeout_s: float) -> None:
        """Wait for something to happen, then look at everything."""
        wait_for = [self._wake] + ([0] if self.owner else [])
        ready, _, _ = select.select(wait_for, [], [], timeout_s)
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, 4096)
        if self.owner and (os.getppid() != self.owner or (0 in ready and not os.read(0, 1))):
            log.warning("the owner of this stack (pid %d) is gone: stopping", self.owner)
            self._stopping = True
        changed = self._reap()
        for s in self.services:
            if s.state == "starting" and not self._stopping and s.spec.ready():
                s.state = "up"
                log.info("%s is up (pid %d)", s.spec.name, s.process.pid)
                changed = True
        if changed:
            self._write_state()

    def _reap(self) -> bool:
        """Take note of everything that ended; start services again. Whether one did."""
        ended = False
        for pid, status in _ended():
            service = next((s for s in self.services if s.process and s.process.pid == pid), None)
            if service is None:
                continue  # an orphan of a service
            ended = True
            service.process.returncode = os.waitstatus_to_exitcode(status)
            self._kill_orphans()
            if self._stopping:
                continue
            how = _how(service.process.returncode)
            service.ends.append((time.time(), how))
            while service.ends[0][0] < time.time() - RESTART_WINDOW_S:
                service.ends.popleft()
            if self.phase == "starting":
                service.state = "failed"
            elif len(service.ends) > MAX_RESTARTS:
                service.state = "failed"
                log.error("%s %s; it did so %d times in %d minutes and is not started again\n%s", service.spec.name, how,
                          len(service.ends), RESTART_WINDOW_S / 60, last_lines(service.spec))
            else:
                log.warning("%s (pid %d) %s: starting it again (%d of %d)", service.spec.name, service.process.pid, how,
                            len(service.ends), MAX_RESTARTS)
                if service.spec.name == "jobmanager":
                    log.warning("the jobs it ran are gone with it: submit them again")
                self._start(service)
        return ended

    def _start(self, service: Running) -> None:
        spec = service.spec
        parent = os.getpid()

        def die_with_parent() -> None:  # in the child; Linux ties this to the thread that forks, which is this process's only one
            _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            if os.getppid() != parent:
                os._exit(1)

        with open(spec.logs[-1], "ab") as out:
            service.process = subprocess.Popen(spec.command, env=spec.env, stdin=subprocess.DEVNULL, stdout=out, stderr=out,
                                               cwd=self.settings.dir, start_new_session=True, preexec_fn=die_with_parent)
        service.state, service.since = "starting", time.time()
        self._write_state()

    def _on_stop(self, number, frame) -> None:
        self._stopping = True

    def _stop(self) -> None:
        """End everything, in order, politely and then not."""
        self._stopping = True
        if self.phase != "failed":
            self.phase = "stopping"
            self._write_state()
        first = [s for s in self.services if s.spec.name == "taskmanager"]
        for group in (first, [s for s in self.services if s not in first]):
            for s in group:
                self._signal(s, signal.SIGTERM)
            begin = time.monotonic()
            overdue: set[str] = set()
            while alive := [s for s in group if s.process and s.process.returncode is None]:
                for s in alive:
                    if s.spec.name not in overdue and time.monotonic() - begin > GRACE_S[s.spec.name]:
                        log.warning("%s does not end: killing it", s.spec.name)
                        overdue.add(s.spec.name)
                        self._signal(s, signal.SIGKILL)
                self._step(0.05)
        self._kill_orphans()
        kill_strays(self.settings.dir)
        self._write_state()
        log.info("stopped")

    def _signal(self, service: Running, number: signal.Signals) -> None:
        if service.process and service.process.returncode is None:  # else its pid may be another's by now
            os.kill(service.process.pid, number)

    def _kill_orphans(self) -> None:
        """Kill all below this process that does not descend from a service: the workers of a dead task manager, and theirs."""
        ours = {self._guard, *(s.process.pid for s in self.services if s.process)}
        while orphans := [c for c in psutil.Process().children() if c.pid not in ours and c.status() != psutil.STATUS_ZOMBIE]:
            kill([p for o in orphans for p in [*o.children(recursive=True), o]])

    def _write_state(self) -> None:
        state = {"pid": os.getpid(), "phase": self.phase, "error": self.error, "settings": self.settings.model_dump(mode="json"),
                 "services": [s.public() for s in self.services if s.process]}
        path = self.settings.dir / STATE
        path.with_suffix(".new").write_text(json.dumps(state))
        path.with_suffix(".new").replace(path)


def _ended() -> list[tuple[int, int]]:
    """(pid, wait status) of every child, own or adopted, that has ended."""
    out = []
    with contextlib.suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            out.append(found)
    return out


def _how(code: int) -> str:
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


def strays(folder: Path) -> list[psutil.Process]:
    """Processes of the stack in `folder`, whoever their parents are; not this one."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARKER) == str(folder):
                found.append(process)
    return found


def kill_strays(folder: Path, timeout_s: float = 10.0) -> None:
    """Kill what a stack in the folder left behind, and what that starts meanwhile."""
    deadline = time.monotonic() + timeout_s
    while (found := strays(folder)) and time.monotonic() < deadline:
        kill(found)


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            log.warning("killing pid %d, left behind: %s", process.pid, command_line(process))
            process.kill()
    time.sleep(0.02)  # their parents may leave them as zombies: gone is who is found no more


def guard(folder: Path) -> int:
    """Fork a process that waits for the end of this one, kills whatever of the stack is left then, and ends; its pid.

    Flink's workers are children of the task manager, which the parent-death signal takes away without asking it. The guard shares
    this process's lock, so that the folder is free only when it is clean.
    """
    read, write = os.pipe()
    if pid := os.fork():
        os.close(read)
        return pid
    os.close(write)
    os.setsid()  # a signal to this process's group does not reach it
    os.read(read, 1)
    kill_strays(folder)
    os._exit(0)


def command_line(process: psutil.Process, width: int = 100) -> str:
    """What a process runs, shortened to what tells it apart."""
    try:
        words = process.cmdline() or [process.name()]
    except psutil.Error:
        return "?"
    # Of a Java command the main class says what it is; hundreds of characters of options stand before it.
    words = [os.path.basename(words[0]), *(w for w in words[1:] if not w.startswith("-") and ".jar" not in w)]
    text = " ".join(" ".join(words).split())
    return text if len(text) <= width else text[: width - 3] + "..."


def last_lines(spec: Spec, count: int = 15) -> str:
    """The ends of a service's logs."""
    out = []
    for path in spec.logs:
        if path.is_file() and (lines := path.read_bytes()[-20_000:].decode(errors="replace").splitlines()):
            out += [f"--- {path}", *lines[-count:]]
    return "\n".join(out)


def hold(folder: Path) -> int | None:
    """The lock of a stack's folder as an open file, or None if its supervisor lives. The kernel gives it back when its holder dies."""
    fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def main() -> int:
    settings, owner = StackSettings.model_validate_json(sys.argv[1]), int(sys.argv[2])
    os.chdir(settings.dir)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s")
    if hold(settings.dir) is None:
        log.info("another supervisor was faster")
        return 0
    return Supervisor(settings, owner or None).run()


if __name__ == "__main__":
    sys.exit(main())
