"""weight_update: what an update costs generation, and where its time goes.

The generate job, the tiny model and SmolLM2-135M: one engine under load, and four engines that have nothing to generate, since four busy ones
would measure how two cores are shared. Versions are offered one after the other, and each ack says how long its parts took: heard, fetched,
checked and decoded, packed (all while generation goes on), waited for the step's end, applied (the only part for which generation stands still).
Beside it what the last part takes without a second set of weights (`generation.spare_weights = false`), and what it takes to copy a version's
bytes once.

`value`: tokens/s of SmolLM2-135M on one engine, with a version every `EVERY_S` ÷ without, in windows that take turns. The benchmark writes and
hashes the versions on the same cores, as a trainer would.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from schemas.record import decode
from schemas.records import Rollout
from tests.benchmarks.common import Measure, machine, mean, quantile, ratio, report
from tests.benchmarks.generate_job import START_S, GenerateJob, local_stack
from tests.benchmarks.latency import PHASES, Sequencer
from tests.integration.conftest import LocalStack

GOAL, COPY_GOAL = 0.98, 2.0
EVERY_S, WINDOW_S = 10.0, 40.0  # four versions a window
PROMPTS = 8_000
CREDIT = {"training.batch": 128, "training.max_lag": 4}
TINY = CREDIT | {"generation.max_tokens": 50, "generation.max_model_len": 128, "generation.dtype": "float32", "generation.kv_cache_mb": 64}
SMOLLM2 = CREDIT | {"generation.max_tokens": 64, "generation.max_model_len": 256, "generation.dtype": "bfloat16", "generation.kv_cache_mb": 128,
                    "generation.chat_template": True}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its engines, with `batch` sequences in flight in each."""

    name: str
    model: str
    engines: int
    batch: int
    prompts: str | None  # none: nothing is generated
    pause_s: float  # between two versions
    flags: dict[str, Any]


CASES = (
    Case("tiny, 1 engine", "tiny", 1, 64, "demo", 1.0, TINY),
    Case("tiny, 4 idle engines", "tiny", 4, 16, None, 1.0, TINY),
    Case("SmolLM2-135M, 1 engine", "SmolLM2-135M", 1, 16, "reasoning_gym:basic_arithmetic", 3.0, SMOLLM2),
    Case("SmolLM2-135M, 4 idle engines", "SmolLM2-135M", 4, 4, None, 6.0, SMOLLM2),
    Case("SmolLM2-135M, 1 engine, loaded in place", "SmolLM2-135M", 1, 16, "reasoning_gym:basic_arithmetic", 3.0,
         SMOLLM2 | {"generation.spare_weights": False}),
)
THROUGHPUT = CASES[2]


def sampled(rollouts: Iterable[tuple[float, float, int]], begin: float, end: float) -> float:
    """Tokens sampled between two moments, by (first token at, ended at, tokens) of rollouts, whose tokens come at an even pace."""
    total = 0.0
    for first, last, tokens in rollouts:
        inside = max(0.0, min(end, last) - max(begin, first))
        total += tokens * (inside / (last - first) if last > first else float(begin <= first < end))
    return total


def copying_ms(tensors: dict[str, Any]) -> float:
    """Milliseconds to copy a version's bytes once, at best."""
    def once() -> float:
        began = time.perf_counter()
        for t in tensors.values():
            t.clone()
        return 1000 * (time.perf_counter() - began)

    return min(once() for _ in range(5))


class Loaded:
    """A case's job with prompts before it and credit behind it."""

    def __init__(self, stack: LocalStack, case: Case, model: str):
        from jobs.prompts import load_prompts
        from operators.log import ensure_topics

        name = "".join(c if c.isalnum() else "-" for c in case.name)
        settings = stack.settings(name, **case.flags | {"model.path": model, "generation.engines": case.engines, "generation.batch": case.batch})
        ensure_topics(settings.kafka, settings.run.id)
        if case.prompts is not None:
            load_prompts(settings, case.prompts, size=PROMPTS, seed=0)
        self.case = case
        with contextlib.ExitStack() as undo:
            self._sequencer = Sequencer(settings)
            undo.callback(self._sequencer.close)
            self.job = undo.enter_context(GenerateJob(stack, settings, self._sequencer.notice))
            print(f"{case.name}: starting the job ...", flush=True)
            self.job.applied(0)
            if case.prompts is not None:
                self.job.rollouts.wait(2 * case.engines * case.batch, START_S, self.job.check)
            self._undo = undo.pop_all()

    def __enter__(self) -> Loaded:
        return self

    def __exit__(self, *_) -> None:
        self._undo.close()

    def timelines(self, versions: int) -> dict[str, list[float]]:
        """{phase: milliseconds} of so many versions on each engine."""
        draw, first = random.Random(0), self.job.event.version + 1
        for _ in range(versions):
            time.sleep(self.case.pause_s * (0.75 + 0.5 * draw.random()))  # not in step with the operators' ticks
            self.job.publish()
            self.job.applied(self.job.event.version)
        phases = [dict(a.phases_ms) for a in self.job.acknowledged() if a.version >= first]
        return {name: [p[name] for p in phases] for name in PHASES}

    def windows(self, rounds: int) -> dict[str, list[float]]:
        """Tokens/s, by side, of windows that take turns."""
        spans: dict[str, list[tuple[float, float]]] = {"without": [], "with": []}
        for _ in range(rounds):
            for side in spans:
                begin = time.time()
                while (left := begin + WINDOW_S - time.time()) > 0:
                    if side == "with" and left > EVERY_S / 2:
                        self.job.publish()
                    time.sleep(min(EVERY_S, max(0.0, begin + WINDOW_S - time.time())))
                    self.job.check()
                spans[side].append((begin, time.time()))
        end = time.time()
        while not any(r.first_token_at and r.first_token_at.timestamp() > end for a in self.job.rollouts.arrivals[-50:] for r in decode(Rollout, a.value)):
            self.job.check()
            time.sleep(0.5)  # what was in flight at the end has ended
        rollouts = [(r.first_token_at.timestamp(), r.finished_at.timestamp(), len(r.token_ids) - r.prompt_length)
                    for a in self.job.rollouts.arrivals for r in decode(Rollout, a.value) if r.first_token_at is not None]
        return {side: [sampled(rollouts, *span) / (span[1] - span[0]) for span in found] for side, found in spans.items()}


def run(*, quick: bool = False) -> None:
    from deploy.models import make_in_process

    on = machine()
    versions, rounds = (5, 2) if quick else (20, 6)
    lines: dict[str, dict[str, list[float]]] = {}
    speed: dict[str, list[float]] = {}
    copying: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="pipelinerl-benchmark-") as folder, local_stack() as stack:
        models = {"tiny": str(make_in_process("demo", Path(folder) / "tiny", 0)), "SmolLM2-135M": str(make_in_process("smollm2"))}
        for case in CASES:
            with Loaded(stack, case, models[case.model]) as loaded:
                lines[case.name] = loaded.timelines(versions)
                print(f"  {case.name}: " + ", ".join(f"{k} {quantile(v, 0.5):.1f}" for k, v in lines[case.name].items()) + " ms", flush=True)
                if case is THROUGHPUT:
                    speed = loaded.windows(rounds)
                    print("  tokens/s: " + ", ".join(f"{k} {', '.join(f'{x:.0f}' for x in v)}" for k, v in speed.items()), flush=True)
                copying[case.model] = copying_ms(loaded.job.tensors)
    value = ratio(f"{THROUGHPUT.name}: tokens/s with a version every {EVERY_S:g} s ÷ without", speed["with"], speed["without"], GOAL)
    measures = [mean(f"{THROUGHPUT.name}: {side}", values, "tokens/s") for side, values in speed.items()]
    for case in CASES:
        for phase, text in PHASES.items():
            values = lines[case.name][phase]
            measures.append(Measure(f"{case.name}: {text}, p50", quantile(values, 0.5), "ms", n=len(values)))
        values = lines[case.name]["apply"]
        measures += [Measure(f"{case.name}: {PHASES['apply']}, longest", max(values), "ms", n=len(values)),
                     Measure(f"{case.name}: applied, p50 ÷ copying a version's bytes once", quantile(values, 0.5) / copying[case.model], "ratio",
                             n=len(values), goal=COPY_GOAL if case is THROUGHPUT else None, at_most=True)]
    measures += [Measure(f"{name}: copying a version's bytes once, at best", ms, "ms") for name, ms in copying.items()]
    report("weight_update", value, measures, sides={"phases_ms": lines, "tokens_per_s": speed},
           settings={"quick": quick, "versions": versions, "every_s": EVERY_S, "window_s": WINDOW_S,
                     "cases": [dataclasses.asdict(c) for c in CASES]}, seeds={"prompts": 0, "moments": 0, "run": 0}, on=on)
