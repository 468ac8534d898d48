"""No orphans and no sleepers: a Python worker whose task manager is gone ends itself, and one that is stopped, not dead, is killed.

Flink starts a worker through a shell and a boot process, which all outlive a task manager that is killed; so the worker watches the
task manager itself. A worker that SIGSTOP or a debugger holds would be waited for without end: it owes a sign of life to a process
of its own, which kills it when none comes. With the worker's pipes its children end.
"""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil

SIGNS = 10  # of life, within the time after which their absence counts
#: Kills the process `argv[1]` if nothing comes from it for `argv[2]` seconds; ends with it.
WATCHDOG = """
import os, select, signal, sys
worker, silence_s = os.pidfd_open(int(sys.argv[1])), float(sys.argv[2])
while select.select([0], [], [], silence_s)[0]:
    if not os.read(0, 4096):
        sys.exit()
os.write(2, f"no sign of life from pid {sys.argv[1]} for {silence_s:g} s (flink.silence_timeout_s): killing it\\n".encode())
signal.pidfd_send_signal(worker, signal.SIGKILL)
"""

_watching = threading.Lock()


def die_with_parent(name: str | None = None, silence_s: float = 300.0) -> None:
    """Called in `open()` of every Flink function; once a process is enough, more are harmless. Linux only.

    `name` (15 bytes) is what `ps` and `top` show: all of Flink's workers are the same command. `silence_s`: see WATCHDOG.
    """
    if name:
        Path("/proc/self/comm").write_text(name)
    if not _watching.acquire(blocking=False):
        return
    parents = psutil.Process().parents()
    owner = next((p for p in parents if p.name() == "java"), parents[0])
    handle = os.pidfd_open(owner.pid)  # readable when the process ends; a reused pid cannot fool it
    threading.Thread(target=_wait, args=(handle,), name="lifeline", daemon=True).start()
    watchdog = subprocess.Popen([sys.executable, "-I", "-S", "-c", WATCHDOG, str(os.getpid()), str(silence_s)], stdin=subprocess.PIPE)
    threading.Thread(target=_live, args=(watchdog.stdin.fileno(), silence_s / SIGNS, watchdog), name="signs-of-life", daemon=True).start()


def _wait(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    while not poll.poll():
        pass
    # Not a word: in a Flink worker prints and logs go to the task manager, and writing to one that is gone can block for ever.
    os._exit(1)


def _live(pipe: int, every_s: float, watchdog: subprocess.Popen) -> None:
    while watchdog.poll() is None:
        os.write(pipe, b".")
        time.sleep(every_s)
