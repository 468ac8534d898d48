"""A service in a child process behind a pipe: engine, grader, reference model.

It shares no interpreter lock with Flink's threads, can be killed and replaced, and ends when its pipe does, so that nothing
is left behind whoever dies first. Frames: 4 bytes length, 1 byte kind, payload. What a frame means is the service's business.
"""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import os
import queue
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

HEADER = struct.Struct("<IB")
CONFIG = 0  # kind of the first frame a child receives: its configuration as JSON
STDERR_LINES = 30

log = logging.getLogger(__name__)


class ChildDied(RuntimeError):
    """The child process ended while it was needed; the text carries its exit status and its last words."""


class Child:
    """The parent's side. `on_frame(kind, payload)` and `on_death(cause)` are called from the reader thread.

    `module` is run as `python -m module`; it must call `serve()`. `config` reaches it as the first frame.
    """

    def __init__(self, module: str, config: dict, *, on_frame: Callable[[int, bytes], None],
                 on_death: Callable[[str], None], env: dict[str, str] | None = None):
        self.module, self._on_frame, self._on_death = module, on_frame, on_death
        path = os.pathsep.join(p for p in sys.path if p)
        self.process = subprocess.Popen(
            [sys.executable, "-m", module], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            bufsize=0, env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **(env or {})},
        )
        self._write_lock = threading.Lock()
        self._closing = False
        self._stderr: collections.deque[str] = collections.deque(maxlen=STDERR_LINES)
        self._stderr_thread = threading.Thread(target=self._pass_stderr, name=f"{module}-stderr", daemon=True)
        self._stderr_thread.start()
        threading.Thread(target=self._read, name=f"{module}-frames", daemon=True).start()
        self.send(CONFIG, json.dumps(config).encode())

    @property
    def pid(self) -> int:
        return self.process.pid

    def send(self, kind: int, payload: bytes) -> None:
        """Raises ChildDied if the pipe is gone (on_death is called too, by the reader)."""
        try:
            with self._write_lock:
                # One write a frame; a raw pipe may take less than it was given.
                data = memoryview(HEADER.pack(len(payload), kind) + payload)
                while data:
                    data = data[self.process.stdin.write(data):]
        except (BrokenPipeError, ValueError) as e:  # ValueError: closed by close()
            raise ChildDied(f"{self.module} (pid {self.pid}) no longer reads") from e

    def close(self, grace_s: float = 2.0) -> None:
        """Close the pipe, which ends the child; kill it if it does not go in `grace_s`."""
        self._closing = True
        # Never under a write: the next child's pipe may get the same descriptor, and the rest of the frame would go there.
        if not self._write_lock.acquire(timeout=grace_s):
            self.process.kill()  # ends the write
            self._write_lock.acquire()
        self.process.stdin.close()
        self._write_lock.release()
        try:
            self.process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        """End it at once; on_death follows."""
        self.process.kill()

    def _read(self) -> None:
        for kind, payload in frames(self.process.stdout):
            self._on_frame(kind, payload)
        status = self.process.wait()
        if self._closing:
            return
        self._stderr_thread.join(1.0)
        how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
        words = "\n".join(self._stderr)
        self._on_death(f"{self.module} (pid {self.pid}) ended with {how}" + (f"; its last words:\n{words}" if words else ""))

    def _pass_stderr(self) -> None:
        for line in self.process.stderr:
            text = line.decode(errors="replace").rstrip()
            self._stderr.append(text)
            log.warning(text)


class QueuedChild:
    """A Child whose `send` never blocks: a thread of its own feeds the pipe, which is full while the service loads."""

    def __init__(self, child: Child):
        self._child = child
        self._frames: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        threading.Thread(target=self._feed, name="child-feed", daemon=True).start()

    def send(self, kind: int, payload: bytes) -> None:
        self._frames.put((kind, payload))

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        self._frames.put(None)
        self._child.close()

    def _feed(self) -> None:
        with contextlib.suppress(ChildDied):  # on_death says so
            while (frame := self._frames.get()) is not None:
                self._child.send(*frame)


def frames(stream) -> Iterator[tuple[int, bytes]]:
    """(kind, payload) of each frame until the stream ends; a torn last frame is dropped."""

    def exactly(n: int) -> bytes | None:
        parts = []
        while n:
            part = stream.read(n)
            if not part:
                return None
            parts.append(part)
            n -= len(part)
        return b"".join(parts)

    while (header := exactly(HEADER.size)) is not None:
        length, kind = HEADER.unpack(header)
        if (payload := exactly(length)) is None:
            return
        yield kind, payload


class Parent:
    """The child's side: `config`, `send`, and `incoming`, which ends the process when the pipe does."""

    def __init__(self):
        # Frames go over the inherited stdout; whatever prints must not get between them.
        self._out = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        self._in = os.fdopen(os.dup(0), "rb", buffering=0)
        self._frames = frames(self._in)
        self._write_lock = threading.Lock()
        kind, payload = next(self._frames, (None, b""))
        if kind != CONFIG:
            sys.exit(f"{sys.argv[0]}: no configuration came over the pipe; this module is started by its operator")
        self.config: dict = json.loads(payload)

    def send(self, kind: int, payload: bytes) -> None:
        try:
            with self._write_lock:
                data = memoryview(HEADER.pack(len(payload), kind) + payload)
                while data:
                    data = data[self._out.write(data):]
        except BrokenPipeError:
            os._exit(0)

    def incoming(self) -> Iterator[tuple[int, bytes]]:
        """Blocks; to be read by a thread of its own if the service computes meanwhile. Never returns: the end of the pipe is the end."""
        yield from self._frames
        os._exit(0)
