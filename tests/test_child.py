"""The pipe to a child process, at its end. What goes over it is tested with those who use it."""

import io
import threading

import pytest

from operators import child as module
from operators.child import Child, ChildDied, QueuedChild


class Pipe:
    """A child's input that takes the configuration and is full then, until the child is killed."""

    def __init__(self):
        self.written, self.closed, self.full, self.freed = 0, False, threading.Event(), threading.Event()

    def write(self, data):
        self.written += 1
        if self.written > 1:
            self.full.set()
            assert self.freed.wait(10)
            assert not self.closed, "the descriptor may be another child's by now"
            raise BrokenPipeError
        return len(data)

    def close(self):
        self.closed = True


class Process:
    def __init__(self, *_, **__):
        self.pid, self.stdin, self.stdout, self.stderr = 1, Pipe(), io.BytesIO(), io.BytesIO()
        self.killed = False

    def kill(self):
        self.killed = True
        self.stdin.freed.set()

    def wait(self, timeout=None):
        return 0


@pytest.fixture
def child(monkeypatch):
    monkeypatch.setattr(module.subprocess, "Popen", Process)
    return Child("module", {}, on_frame=lambda kind, payload: None, on_death=lambda cause: None)


def test_a_pipe_is_never_closed_under_a_write(child):
    """What is left of the frame would go to whoever gets the descriptor next: a successor met half a sample as its first frame."""
    failed = []

    def send():
        try:
            child.send(1, b"a frame that the child does not take")
        except BaseException as e:
            failed.append(e)

    sender = threading.Thread(target=send)
    sender.start()
    assert child.process.stdin.full.wait(10)
    child.close(grace_s=0.05)
    sender.join(10)
    assert child.process.killed and child.process.stdin.closed
    assert [type(e) for e in failed] == [ChildDied]


def test_a_child_that_reads_is_not_killed_and_takes_nothing_any_more_when_it_is_closed(child):
    queued = QueuedChild(child)
    queued.close()
    queued.close()
    assert child.process.stdin.closed and not child.process.killed
