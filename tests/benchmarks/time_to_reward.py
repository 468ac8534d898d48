"""time_to_reward: the pipeline against conventional reinforcement learning, which generates and trains by turns, on the same cores.

The demo's task, whose answers are 2 to 48 tokens long, from the same start model, with the same operators, prompts and seeds. A conventional
side has G = max_lag + 1: B * G samples under one version, then G steps. In each phase it has the cores for itself and an engine and a rank for
each of them; the pipeline has one engine and one rank. The sides take turns, seed by seed; with more than a first look, each side's learning
rate is the best of the same three, on a seed that is not counted.

Throughput and sample efficiency are reported apart (dR/dt = dR/dS * dS/dt): samples/s from the first sampled token to the last step; samples
to a reward and seconds to it, from the mean reward of the last `WINDOW` graded samples, and the samples that were trained when they were
sampled. There is no ratio against a side that did not reach the reward.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from schemas.settings import Settings
from tests.benchmarks.common import OUT, Measure, machine, mean, ratio, report
from tests.benchmarks.generate_job import local_stack

GOAL, REWARD, WINDOW = 1.8, 0.6, 512
STEPS = 192  # a multiple of every G
SEEDS, SEARCH_SEED, LEARNING_RATES = 10, 1000, (2e-4, 4e-4, 8e-4)
PROMPTS = 6_000

COMMON = {
    "run.max_steps": STEPS, "mlflow.enabled": "false",
    "generation.batch": 16, "generation.max_tokens": 50, "generation.max_model_len": 128, "generation.dtype": "float32",
    "generation.kv_cache_mb": 64, "grouping.group_size": 8, "grouping.timeout_s": 120, "packing.token_budget": 4096,
    "training.batch": 64, "training.lr": 4e-4, "training.betas": [0.9, 0.99], "training.warmup_steps": 30, "training.gradient_clipping": 0.1,
    "training.dtype": "float32", "training.denominator": "tokens", "training.checkpoint_every": STEPS,
    "flink.tick_ms": 50, "flink.bundle_ms": 50, "flink.bundle_size": 1000,
}
#: A conventional side generates with as many sequences at once as help it: 32 an engine.
ALL_CORES = {"run.mode": "conventional", "generation.engines": os.cpu_count() or 1, "training.ranks": os.cpu_count() or 1,
             "generation.batch": 32}
SIDES: dict[str, dict[str, Any]] = {
    "pipeline, max_lag 7": {"training.max_lag": 7},
    "conventional, G = 8": ALL_CORES | {"training.max_lag": 7},
    "pipeline, max_lag 3": {"training.max_lag": 3},
    "conventional, G = 1": ALL_CORES | {"training.max_lag": 0},
    "conventional, G = 32": ALL_CORES | {"training.max_lag": 31},
}
PAIR = "pipeline, max_lag 7", "conventional, G = 8"  # the same bound on lag
CONVENTIONAL = [name for name, flags in SIDES.items() if "run.mode" in flags]


@dataclasses.dataclass(frozen=True)
class Curve:
    """What a run learned. All lists have an entry a graded sample, in the order in which they ended, from the `WINDOW`th on."""

    reward: list[float]  # mean of the last WINDOW
    samples: list[float]  # trained before the newest version that sampled it
    seconds: list[float]  # since the first sampled token
    samples_per_s: float  # trained, from the first sampled token to the last step
    lag: list[float]  # mean of each step
    ess: list[float]

    def thin(self, points: int = 500) -> Curve:
        """The same with so many points at most: what a file needs."""
        every = max(1, -(-len(self.reward) // points))
        return dataclasses.replace(self, reward=self.reward[::every], samples=self.samples[::every], seconds=self.seconds[::every])

    def reach(self, reward: float) -> tuple[float, float] | None:
        """(samples, seconds) when it first had so much; None if it never did."""
        at = next((i for i, r in enumerate(self.reward) if r >= reward), None)
        return None if at is None else (self.samples[at], self.seconds[at])


def curve_of(rollouts: list[tuple[float, float, int, float]], steps: list[tuple[float, float, float]], batch: int, window: int = WINDOW) -> Curve:
    """rollouts: (first token at, ended at, newest version, reward); steps: (finished at, mean lag, ESS) of step 1, 2, ...; times in seconds."""
    rollouts = sorted(rollouts, key=lambda r: r[1])
    began = min(r[0] for r in rollouts)
    rewards = np.array([r[3] for r in rollouts])
    smooth = np.convolve(rewards, np.full(window, 1 / window), "valid")
    rest = rollouts[window - 1:]
    return Curve(smooth.tolist(), [r[2] * float(batch) for r in rest], [r[1] - began for r in rest],
                 len(steps) * batch / (steps[-1][0] - began), [s[1] for s in steps], [s[2] for s in steps])


def learned(settings: Settings, load: Callable[[Settings], Any]) -> Curve:
    """Run it to its end on the prompts that `load` loads."""
    from jobs.run import Run

    made = Run(settings).go(load)
    if not made["accounting_adds_up"]:
        raise RuntimeError(f"{settings.run.id}: the accounting does not add up: {made['accounting']}")
    return read_curve(settings)


def read_curve(settings: Settings) -> Curve:
    """The curve of a run that has ended, from its topics."""
    from jobs.run import every_message
    from schemas.record import read, rows_of
    from schemas.records import Rollout, Step
    from schemas.topics import SCORED
    from schemas.topics import STEPS as STEP_RECORDS

    rollouts = []
    for message in every_message(settings, SCORED):
        table = read(Rollout, message).select(["first_token_at", "finished_at", "policy_version_max", "reward"])
        for first, ended, version, reward in zip(*(c.to_pylist() for c in table.columns), strict=True):
            if reward is not None:
                rollouts.append((first.timestamp(), ended.timestamp(), version, reward))
    steps = sorted((s for s in rows_of(Step, every_message(settings, STEP_RECORDS)) if s.step), key=lambda s: s.step)
    measured = [(s.finished_at.timestamp(), dict(s.metrics)) for s in steps]
    return curve_of(rollouts, [(at, m["lag/mean"], m["ess/raw"]) for at, m in measured], settings.training.batch)


def plot(curves: dict[str, list[Curve]], path: Path) -> None:
    """R(samples), R(seconds), lag and effective sample size of the first seed of each side."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    for name, made in curves.items():
        c = made[0]
        for axis, x, y in ((axes[0, 0], c.samples, c.reward), (axes[0, 1], c.seconds, c.reward),
                           (axes[1, 0], range(1, len(c.lag) + 1), c.lag), (axes[1, 1], range(1, len(c.ess) + 1), c.ess)):
            axis.plot(x, y, linewidth=1, label=name, linestyle="--" if name in CONVENTIONAL else "-")
    for axis, x, y in zip(axes.flat, ("trained samples", "seconds", "optimizer step", "optimizer step"),
                          (f"reward, mean of {WINDOW}",) * 2 + ("mean token lag [steps]", "effective sample size"), strict=True):
        axis.set_xlabel(x)
        axis.set_ylabel(y)
        axis.grid(alpha=0.3)
    axes[0, 0].legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def run(*, quick: bool = False) -> None:
    from deploy.models import make_in_process
    from jobs.prompts import load_prompts

    on = machine()
    rounds = 2 if quick else SEEDS
    curves: dict[str, list[Curve]] = {name: [] for name in SIDES}
    rates = dict.fromkeys(SIDES, COMMON["training.lr"])
    with local_stack() as stack:
        models: dict[int, str] = {}

        def learn(side: str, seed: int, lr: float) -> Curve:
            if seed not in models:
                models[seed] = str(make_in_process("demo", stack.runs / f"model-{seed}", seed))
            ident = f"{''.join(c if c.isalnum() else '-' for c in side)}-{seed}-{lr:g}".replace(".", "-")
            settings = stack.settings(ident, **(COMMON | SIDES[side] | {"run.seed": seed, "training.lr": lr, "model.path": models[seed]}))
            found = learned(settings, lambda s: load_prompts(s, "demo", size=PROMPTS, seed=seed))
            reached = found.reach(REWARD)
            print(f"{side}, seed {seed}, lr {lr:g}: {found.samples_per_s:.0f} samples/s, reward {found.reward[-1]:.2f}, " + (
                f"{REWARD} after {reached[0]:.0f} samples and {reached[1]:.0f} s" if reached else f"{REWARD} not reached"), flush=True)
            return found

        if not quick:
            for side in SIDES:
                tried = {lr: learn(side, SEARCH_SEED, lr) for lr in LEARNING_RATES}
                rates[side] = max(tried, key=lambda lr: (-(tried[lr].reach(REWARD) or (np.inf,))[0], tried[lr].reward[-1]))
        for seed in range(rounds):
            for side in SIDES:
                curves[side].append(learn(side, seed, rates[side]))
    value, measures = compare(curves)
    plot(curves, OUT / "time_to_reward.png")
    report("time_to_reward", value, measures, sides={n: [dataclasses.asdict(c.thin()) for c in made] for n, made in curves.items()},
           settings={"quick": quick, "steps": STEPS, "reward": REWARD, "window": WINDOW, "lr": rates, "common": json.loads(json.dumps(COMMON)),
                     "sides": SIDES}, seeds={"first": 0, "count": rounds}, on=on)


def compare(curves: dict[str, list[Curve]]) -> tuple[Measure, list[Measure]]:
    """(the ratio of throughputs at the same bound on lag, everything else)."""
    speed = {name: [c.samples_per_s for c in made] for name, made in curves.items()}
    reached = {name: [c.reach(REWARD) for c in made] for name, made in curves.items()}
    whole = {name: made for name, made in reached.items() if None not in made}  # every seed got there
    value = ratio(f"samples/s: {PAIR[0]} ÷ {PAIR[1]}", speed[PAIR[0]], speed[PAIR[1]], GOAL)
    measures = [mean(f"{name}: trained", values, "samples/s") for name, values in speed.items()]
    for name, made in reached.items():
        if name in whole:
            measures += [mean(f"{name}: to a reward of {REWARD}", [r[0] for r in made], "samples"),
                         mean(f"{name}: to a reward of {REWARD}", [r[1] for r in made], "s")]
        measures += [Measure(f"{name}: seeds that reached {REWARD}", sum(r is not None for r in made), "", n=len(made)),
                     mean(f"{name}: lag, mean over the steps", [float(np.mean(c.lag)) for c in curves[name]], "steps"),
                     mean(f"{name}: effective sample size, mean over the steps", [float(np.mean(c.ess)) for c in curves[name]], "share")]
    rivals = [name for name in CONVENTIONAL if name in whole]
    for kind, unit, goal in ((0, "samples", 1.1), (1, "seconds", None)):
        if rivals:
            best = min(rivals, key=lambda name: float(np.mean([r[kind] for r in whole[name]])))
            for ours in (n for n in whole if n not in CONVENTIONAL):
                r = ratio(f"{unit} to {REWARD}: {ours} ÷ {best}, the best conventional side", [x[kind] for x in whole[ours]],
                          [x[kind] for x in whole[best]])
                measures.append(dataclasses.replace(r, goal=goal, at_most=True))
    return value, measures
