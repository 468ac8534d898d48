import signal
import time

import pytest

from jobs.run import Run
from schemas.settings import load


def test_a_signal_that_comes_twice_at_once_is_one_and_a_later_one_ends_at_once(monkeypatch):
    """`timeout`, make and terminals pass signals on: two within microseconds held each other's handler for ever."""
    run, at = Run(load(flags={"run.id": "r"})), 100.0
    monkeypatch.setattr(time, "monotonic", lambda: at)
    for _ in range(3):
        run._on_signal(signal.SIGTERM, None)
    assert run._stop_asked_at == 100.0
    at = 101.0
    with pytest.raises(KeyboardInterrupt):
        run._on_signal(signal.SIGTERM, None)
