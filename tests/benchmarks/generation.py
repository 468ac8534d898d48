"""generation: what the generate job makes of its engine's speed.

The job (admission, the engine's operator, its child process, the sink, under Flink, from Kafka to Kafka) and the bare engine take the same
prompts in turns, each idle in the other's turn. Tokens/s counts sampled tokens from the round's first one to its last sequence's end, on
both sides. Occupancy: sequences in flight ÷ min(H, samples that were let in and are not done), over time, by the rollouts' own stamps;
beside it, by the engine's counters, what of the samples that have reached it is in flight.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import queue
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from operators.child import Child
from operators.generation import engine_config, engine_env
from schemas.record import decode
from schemas.records import Prompt, Rollout
from schemas.settings import Settings
from tests.benchmarks.bare_engine import READY, ROUND
from tests.benchmarks.common import Measure, alternate, cpu_seconds, machine, mean, ratio, report
from tests.benchmarks.generate_job import START_S, GenerateJob, local_stack
from tests.integration.conftest import LocalStack

SEED = 0
GOAL, OCCUPANCY_GOAL = 0.98, 0.97


@dataclasses.dataclass(frozen=True)
class Case:
    """A model with its settings; a round is `groups` prompts of `group_size` samples each."""

    name: str
    source: str
    groups: int
    rounds: int
    flags: dict[str, Any]


CASES = (
    Case("tiny", "demo", 192, 6, {
        "generation.batch": 64, "generation.max_tokens": 50, "generation.max_model_len": 128, "generation.dtype": "float32",
        "generation.kv_cache_mb": 64}),
    Case("SmolLM2-135M", "reasoning_gym:basic_arithmetic", 8, 5, {
        "generation.batch": 16, "generation.max_tokens": 64, "generation.max_model_len": 256, "generation.dtype": "bfloat16",
        "generation.chat_template": True}),
)


def occupancy(samples: Sequence[tuple[float, float, float]], capacity: int) -> float:
    """Integral of the sequences in flight ÷ that of min(capacity, sequences outstanding), from the first token to the last end.

    samples: (when it was let in, when its first token was sampled, when it ended), seconds. First tokens and ends are ends of engine
    steps: a sequence is in flight from the step end before the one of its first token.
    """
    times = np.array(samples)
    let_in, first, ended = times.T
    steps = np.unique(np.concatenate([first, ended]))
    started = np.sort(np.maximum(np.concatenate([[-np.inf], steps])[np.searchsorted(steps, first)], let_in))
    let_in, ended = np.sort(let_in), np.sort(ended)
    edges = np.unique(np.concatenate([let_in, started, ended, [first.min()]]))
    edges = edges[edges >= first.min()]
    widths, at = np.diff(edges), edges[:-1]
    done = np.searchsorted(ended, at, side="right")
    in_flight = np.searchsorted(started, at, side="right") - done
    outstanding = np.searchsorted(let_in, at, side="right") - done
    return float((in_flight * widths).sum() / (np.minimum(capacity, outstanding) * widths).sum())


def stamps(rollout: Rollout) -> tuple[float, float, float]:
    """Let in, first token, end."""
    return rollout.dispatched_at.timestamp(), rollout.first_token_at.timestamp(), rollout.finished_at.timestamp()


class JobSide:
    """Rounds of the generate job."""

    def __init__(self, job: GenerateJob, prompts: list[Prompt]):
        self._job, self._prompts, self._round = job, prompts, 0
        self._samples = len(prompts) * job.settings.grouping.group_size

    def __call__(self, _: int) -> dict[str, Any]:
        job, number = self._job, self._round
        self._round += 1
        engine = job.engine_pid() if number else None  # the first round starts it
        before = self._cpu(engine)
        began, came = time.monotonic(), len(job.rollouts.arrivals)
        job.feed([dataclasses.replace(p, dataset_pass=number) for p in self._prompts])
        job.rollouts.wait(self._round * self._samples, START_S, job.check)
        wall = time.monotonic() - began
        after = self._cpu(engine)
        job.relabel()  # its ack brings the engine's counters
        ack = job.applied(job.event.version)
        rollouts = [r for a in job.rollouts.arrivals[came:] for r in decode(Rollout, a.value)]
        if bad := [r for r in rollouts if r.finish_reason not in ("stop", "length")]:
            raise RuntimeError(f"{len(bad)} rollouts are none: {bad[0].finish_reason}, {bad[0].finish_cause}")
        tokens = sum(len(r.token_ids) - r.prompt_length for r in rollouts)
        seconds = max(r.finished_at for r in rollouts).timestamp() - min(r.first_token_at for r in rollouts).timestamp()
        return {
            "tokens": tokens, "seconds": seconds, "samples": len(rollouts), "truncated": sum(r.truncated for r in rollouts),
            "occupancy": occupancy([stamps(r) for r in rollouts], job.settings.generation.batch),
            "counters": (ack.in_flight_sum, ack.capacity_sum), "cpu_s": after[0] - before[0],
            "cpu_engine": (after[0] - before[0]) / wall, "cpu_rest": (after[1] - before[1]) / wall,
        }

    def _cpu(self, engine: int | None) -> tuple[float, float]:
        """(the engine's CPU seconds, the rest of the stack's)."""
        own = cpu_seconds(engine) if engine else 0.0
        return own, sum(cpu_seconds(pid) for pid in self._job.stack_pids()) - own


class BareSide:
    """Rounds of the bare engine, in a child process that waits for the word."""

    def __init__(self, settings: Settings, prompts: list[Prompt]):
        self._frames: queue.Queue[tuple[int, bytes] | str] = queue.Queue()
        config = {"model": settings.model.path, "generation": settings.generation.model_dump(mode="json"),
                  "seed": engine_config(settings, "bare")["seed"], "prompts": [p.prompt for p in prompts],
                  "group_size": settings.grouping.group_size}
        self._child = Child("tests.benchmarks.bare_engine", config, on_frame=lambda *frame: self._frames.put(frame),
                            on_death=self._frames.put, env=engine_env(settings, 0))
        self._round = 0

    @property
    def pid(self) -> int:
        return self._child.pid

    def wait_until_ready(self) -> None:
        kind, _ = self._next()
        if kind != READY:
            raise RuntimeError(f"the bare engine began with a frame of kind {kind}")

    def __call__(self, _: int) -> dict[str, Any]:
        self._round += 1
        self._child.send(ROUND, f"0.{self._round}".encode())  # a salt a round, as the job has a version a round
        return json.loads(self._next()[1])

    def _next(self) -> tuple[int, bytes]:
        frame = self._frames.get(timeout=START_S)
        if isinstance(frame, str):
            raise RuntimeError(f"the bare engine died: {frame}")
        return frame

    def close(self) -> None:
        self._child.close()


def measure(stack: LocalStack, case: Case, model: Path, rounds: int) -> tuple[list[Measure], dict[str, Any], dict[str, Any]]:
    """(measures, the first of which is the ratio; the sides' rounds; the settings) of a case."""
    from jobs.prompts import prompts_of

    prompts = list(prompts_of(case.source, size=case.groups, seed=SEED))
    # Credit for all rounds at once: nobody trains here, and what is measured is the engine with work before it.
    flags = case.flags | {"model.path": str(model), "training.batch": 8 * case.groups, "training.max_lag": rounds + 2}
    settings = stack.settings(case.name.replace(".", "-"), **flags)
    print(f"{case.name}: {rounds} rounds of {8 * case.groups} samples a side; starting job and bare engine ...", flush=True)
    with contextlib.ExitStack() as undo:
        job = undo.enter_context(GenerateJob(stack, settings))
        job_side = JobSide(job, prompts)
        job_side(0)  # warm-up: starts the engine, and is the first round of both
        bare = BareSide(settings, prompts)
        undo.callback(bare.close)
        bare.wait_until_ready()
        bare(0)
        idle: dict[str, list[float]] = {"job": [], "bare": []}
        pids = job.stack_pids()

        def watched(run, resting: str, of: list[int]):
            def turn(i: int) -> dict[str, Any]:
                before, began = sum(map(cpu_seconds, of)), time.monotonic()
                made = run(i)
                idle[resting].append((sum(map(cpu_seconds, of)) - before) / (time.monotonic() - began))
                print(f"  {made['tokens'] / made['seconds']:,.0f} tokens/s ({'bare' if resting == 'job' else 'job'})", flush=True)
                return made
            return turn

        first = job.applied(1)
        sides = alternate({"job": watched(job_side, "bare", [bare.pid]), "bare": watched(bare, "job", pids)}, rounds)
    speed = {name: [r["tokens"] / r["seconds"] for r in made] for name, made in sides.items()}
    in_flight, capacity = (last - start for last, start in zip(sides["job"][-1]["counters"], (first.in_flight_sum, first.capacity_sum),
                                                               strict=True))
    label = case.name
    measures = [
        ratio(f"{label}: job ÷ bare engine, tokens/s", speed["job"], speed["bare"], GOAL),
        ratio(f"{label}: job ÷ bare engine, tokens a CPU second of the engine",
              *([r["tokens"] / r["cpu_s"] for r in sides[n]] for n in speed)),
        mean(f"{label}: job", speed["job"], "tokens/s"), mean(f"{label}: bare engine", speed["bare"], "tokens/s"),
        mean(f"{label}: in flight ÷ min(H, outstanding), by time", [r["occupancy"] for r in sides["job"]], "ratio", OCCUPANCY_GOAL),
        Measure(f"{label}: in flight ÷ min(H, held by the engine), by step", in_flight / capacity, "ratio", n=rounds),
        mean(f"{label}: CPU of the job's engine in its turn", [r["cpu_engine"] for r in sides["job"]], "cores"),
        mean(f"{label}: CPU of Flink, Kafka and workers in it", [r["cpu_rest"] for r in sides["job"]], "cores"),
        mean(f"{label}: CPU of the job's side while it rests", idle["job"], "cores"),
        mean(f"{label}: CPU of the bare engine while it rests", idle["bare"], "cores"),
    ]
    kept = {"rounds": rounds, "groups": case.groups, "prompts": case.source, "group_size": settings.grouping.group_size} | case.flags
    return measures, {f"{label}, {name}": made for name, made in sides.items()}, kept


def run(*, quick: bool = False) -> None:
    from deploy.models import make_in_process

    on = machine()
    found: dict[str, list[Measure]] = {}
    sides: dict[str, Any] = {}
    settings: dict[str, Any] = {"quick": quick}
    with tempfile.TemporaryDirectory(prefix="pipelinerl-benchmark-") as folder:
        models = {"tiny": make_in_process("demo", Path(folder) / "tiny", SEED), "SmolLM2-135M": make_in_process("smollm2")}
        with local_stack() as stack:
            for case in CASES:
                found[case.name], made, settings[case.name] = measure(stack, case, models[case.name], 2 if quick else case.rounds)
                sides |= made
    value, *more = found["SmolLM2-135M"] + found["tiny"]
    report("generation", value, more, sides=sides, settings=settings, seeds={"prompts": SEED, "run": 0}, on=on)
