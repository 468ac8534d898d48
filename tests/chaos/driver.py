"""A seeded driver: runs the tiny pipeline, kills its processes on a schedule, and asks the log what became of every sample.

Nothing here is trusted to say how it went but the topics: what was lost or trained twice, how many second rollouts were told apart, and the
longest pauses between two rollouts and between two steps from each kill to the next.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil

from jobs.prompts import load_prompts
from jobs.run import Run, every_message
from operators.accounting import account_topics
from operators.control import say
from operators.log import consumer, ends, ensure_topics
from operators.waits import table, waits_of
from schemas.record import read, rows_of
from schemas.records import Manifest, Rollout, Step, Weights
from schemas.settings import Settings
from schemas.topics import BATCHES, PROMPTS, ROLLOUTS, STEPS, WEIGHTS, topic
from tests.integration.conftest import SMALL, LocalStack

RECOVERY_S = 240.0  # nothing may need longer
PAUSE_S = (2.0, 6.0)  # between a recovery and the next kill
SILENCE_S = 15.0  # a stopped process counts as gone after it
FLAGS = SMALL | {
    "generation.max_restarts": 1000, "grouping.timeout_s": 60, "training.max_lag": 3, "training.lr": 1e-4, "training.checkpoint_every": 4,
    "weights.encoding": "delta", "weights.full_every": 6, "flink.checkpoint_interval_s": 2, "flink.restart_attempts": 1000,
    "flink.silence_timeout_s": SILENCE_S,
}


class NotRecovered(AssertionError):
    """The pipeline stood still after a kill; the text names the kill and what still moved."""


@dataclasses.dataclass(frozen=True)
class Kill:
    """What was done, and the longest pauses of generation and training from then to the next kill, in seconds."""

    what: str
    at: float
    generation_s: float
    training_s: float


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of the table: a kind of kill, and what the log says of the run it was done in."""

    process: str
    kills: int
    lost: int
    twice: int
    duplicates_removed: int
    generation_p50_s: float
    generation_max_s: float
    training_p50_s: float
    training_max_s: float


# --- who is killed


def _service(name: str) -> Callable[[LocalStack], list[psutil.Process]]:
    def find(stack: LocalStack) -> list[psutil.Process]:
        return [psutil.Process(s.pid) for s in stack.stack.status() if s.name == name and s.pid]

    return find


def _below_the_task_manager(stack: LocalStack) -> list[psutil.Process]:
    return [p for t in _service("taskmanager")(stack) for p in t.children(recursive=True)]


def _worker(name: str) -> Callable[[LocalStack], list[psutil.Process]]:
    """Flink's Python workers by the name they give themselves: generate-0, preprocess-0, rank-0, ..."""
    return lambda stack: _matching(stack, lambda p: p.name().startswith(name) and "beam_boot" in " ".join(p.cmdline()))


def _child(module: str) -> Callable[[LocalStack], list[psutil.Process]]:
    return lambda stack: _matching(stack, lambda p: p.cmdline()[-2:] == ["-m", module])


def _matching(stack: LocalStack, is_one: Callable[[psutil.Process], bool]) -> list[psutil.Process]:
    found = []
    for p in _below_the_task_manager(stack):
        try:
            if p.status() != psutil.STATUS_ZOMBIE and is_one(p):
                found.append(p)
        except (psutil.NoSuchProcess, IndexError):
            continue
    return found


FIND = {
    "generate worker": _worker("generate"), "preprocess worker": _worker("preprocess"), "rank": _worker("rank"),
    "engine": _child("operators.engine"), "reference": _child("operators.reference_child"), "grader": _child("operators.grader"),
    "task manager": _service("taskmanager"), "job manager": _service("jobmanager"), "broker": _service("kafka"), "mlflow": _service("mlflow"),
}
#: What hurts together, and what is stopped, not dead.
PAIRS = ("rank + broker", "generate worker + preprocess worker", "task manager + broker", "engine + rank", "task manager + job manager")
STOPPED = ("engine (SIGSTOP)", "rank (SIGSTOP)", "preprocess worker (SIGSTOP)")
LOADER = "prompt loader"
ALL = (*FIND, *PAIRS, *STOPPED, LOADER)


def strike(what: str, stack: LocalStack, settings: Settings, dice: random.Random) -> None:
    """Do what `what` (of ALL) says, now."""
    if what == LOADER:
        _kill_a_loader(settings, dice)
        return
    number = signal.SIGSTOP if what.endswith("(SIGSTOP)") else signal.SIGKILL
    for name in what.removesuffix(" (SIGSTOP)").split(" + "):
        end = time.monotonic() + RECOVERY_S
        while not (found := FIND[name](stack)):  # another kill has just taken it away
            if time.monotonic() > end:
                raise NotRecovered(f"there is no {name} to kill")
            time.sleep(0.2)
        dice.choice(found).send_signal(number)


LOADED, LOADER_SEED = 3000, 77
_LOAD = """
import sys
from jobs.prompts import load_prompts
from schemas.settings import Settings
load_prompts(Settings.model_validate_json(sys.argv[1]), "demo", size=int(sys.argv[2]), seed=int(sys.argv[3]))
"""


def _kill_a_loader(settings: Settings, dice: random.Random) -> None:
    """Begin to load a data set, be killed, load it again: every prompt is there once."""
    name = topic(settings.run.id, PROMPTS)

    def loaded() -> int:
        client = consumer(settings.kafka)
        try:
            return sum(ends(client, name).values())
        finally:
            client.close()

    before, seed = loaded(), LOADER_SEED + dice.randrange(10**6)
    process = subprocess.Popen([sys.executable, "-c", _LOAD, settings.model_dump_json(), str(LOADED), str(seed)])
    end = time.monotonic() + 60
    while loaded() == before and time.monotonic() < end:
        time.sleep(0.01)
    process.kill()
    process.wait()
    report = load_prompts(settings, "demo", size=LOADED, seed=seed)
    if report.added + report.already != LOADED:
        raise NotRecovered(f"the loader found {report.already} prompts and added {report.added}, not {LOADED} in all")


# --- a run


class Newest:
    """Newest rollout and step on record, for the driver to wait by."""

    def __init__(self, settings: Settings):
        self._client, self._settings = consumer(settings.kafka), settings

    def counts(self) -> tuple[int, int] | None:
        """Records in (rollouts, steps); None while the broker is away."""
        run = self._settings.run.id
        try:
            return sum(ends(self._client, topic(run, ROLLOUTS)).values()), sum(ends(self._client, topic(run, STEPS)).values())
        except Exception:  # of many kinds, all of which mean: not now
            return None

    def wait_for_more(self, rollouts: int, steps: int, why: str) -> None:
        """Until so many more of each have come."""
        start, end = None, time.monotonic() + RECOVERY_S
        while True:
            now = self.counts()
            start = start or now
            if now is not None and now[0] >= start[0] + rollouts and now[1] >= start[1] + steps:
                return
            if time.monotonic() > end:
                found = waits_of(self._settings) if now is not None else None
                raise NotRecovered(f"{why}: not within {RECOVERY_S:.0f} s; rollouts and steps were {start}, are {now}\n"
                                   f"{table(found) if found is not None else 'the broker is away'}")
            time.sleep(0.3)

    def close(self) -> None:
        self._client.close()


def chaos(stack: LocalStack, model: str, run_id: str, kills: Sequence[str], seed: int, **flags: Any) -> tuple[Settings, list[Kill], dict]:
    """A run during which `kills` are done one after the other, each after the pipeline has recovered from the one before.

    Returns (its settings, the kills with the times of recovery, its summary). Raises NotRecovered; a run that fails raises RunFailed.
    """
    settings = stack.settings(run_id, **(FLAGS | {"model.path": model} | flags))
    dice, done, errors = random.Random(seed), [], []

    def drive() -> None:
        newest = Newest(settings)
        try:
            newest.wait_for_more(1, 4, "the run's first steps")
            for what in kills:
                time.sleep(dice.uniform(*PAUSE_S))
                strike(what, stack, settings, dice)
                done.append((what, time.time()))
                time.sleep(1.0)  # what was on its way arrives
                newest.wait_for_more(4, 2, f"after kill {len(done)} ({what})")
        except BaseException as e:
            errors.append(e)
        finally:
            done.append(("end", time.time()))
            newest.close()
            say(settings, "stop", "the schedule of kills is at its end")

    ensure_topics(settings.kafka, run_id)
    driver = threading.Thread(target=drive, name="chaos")
    driver.start()
    summary = Run(settings).go(lambda s: load_prompts(s, "demo", size=10_000, seed=seed))
    driver.join()
    if errors:
        raise errors[0]
    return settings, recoveries(settings, done), summary


def recoveries(settings: Settings, done: list[tuple[str, float]]) -> list[Kill]:
    """The pauses after each kill; the last entry is the end."""
    ended = sorted(t.timestamp() for m in every_message(settings, ROLLOUTS)
                   for t in read(Rollout, m).column("finished_at").to_pylist())
    trained = sorted(s.finished_at.timestamp() for s in rows_of(Step, every_message(settings, STEPS)))

    return [Kill(what, at, longest_pause(ended, at, until), longest_pause(trained, at, until))
            for (what, at), (_, until) in itertools.pairwise(done)]


def longest_pause(times: list[float], start: float, end: float) -> float:
    """Between two of the times from start to end; the start counts as one of them, the end does not.

    >>> longest_pause([1.0, 2.0, 6.0, 7.0, 30.0], 1.5, 9.0)
    4.0
    """
    inside = [start, *(t for t in times if start < t <= end)]
    return max((b - a for a, b in itertools.pairwise(inside)), default=end - start)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the log says of a run. All but `duplicates` must be 0."""

    lost: int  # samples without an outcome, or with one that contradicts
    twice: int  # samples in more than one step, or steps and versions made twice with different results
    duplicates: int  # second rollouts of a sample that were told apart


def verdict(settings: Settings) -> Verdict:
    accounts = account_topics(settings.kafka, settings.run.id)
    spent = collections.Counter((x["group_id"], x["sample_index"]) for m in rows_of(Manifest, every_message(settings, BATCHES))
                                if m.kind == "step" for x in m.samples)
    digests = collections.defaultdict(set)
    for w in rows_of(Weights, every_message(settings, WEIGHTS)):
        digests[w.version].add(w.digest)
    missing = accounts.admitted - sum(accounts.outcomes.values())
    return Verdict(missing + len(accounts.wrong), sum(n > 1 for n in spent.values()) + sum(len(d) > 1 for d in digests.values()),
                   accounts.duplicates)


def row(process: str, kills: list[Kill], found: Verdict) -> Row:
    generation, training = [k.generation_s for k in kills], [k.training_s for k in kills]
    return Row(process, len(kills), found.lost, found.twice, found.duplicates, statistics.median(generation), max(generation),
               statistics.median(training), max(training))
