"""trl: the pipeline against TRL's GRPOTrainer on the same cores, from the same start weights, with the same prompts, reward and batch.

Three workloads: the character model with answers of 5 tokens, all of one length (TRL's best case on a CPU); the same with answers of 2 to 200
tokens; a model of 10M parameters and more with answers of 16 to 256. Both sides take the advantage without division by the deviation, the
loss over all tokens of a step, AdamW and a constant rate behind a warm-up; neither has a reference model or a tracker. Ours takes samples that
are up to `max_lag` steps old, TRL's are of the newest weights.

samples/s count from the first token to the last step, without start-up on either side. Seconds and samples to a reward are from the mean of
the last `WINDOW` graded samples, and only where both sides reached it. TRL lives in an environment of its own, made by uv at the first use.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from random import Random
from typing import Any

from operators.demo_task import problem
from tests.benchmarks.common import Measure, machine, mean, ratio, report
from tests.benchmarks.generate_job import local_stack
from tests.benchmarks.time_to_reward import COMMON, WINDOW, Curve, curve_of, learned

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENT = Path("out") / "trl-environment"
TRL = "1.16.0"
OURS, THEIRS = "pipeline", "trl"
GROUP_SIZE, BETAS = COMMON["grouping.group_size"], COMMON["training.betas"]
BATCH, MAX_LAG, WARMUP, PROMPTS = 16 * GROUP_SIZE, 3, 10, 4_000


def copy(rng: Random) -> tuple[str, str]:
    """`4711>` is answered by 4711: four characters and an end token."""
    digits = f"{rng.randrange(10_000):04d}"
    return f"{digits}>", digits


def unary(shortest: int, longest: int) -> Callable[[Random], tuple[str, str]]:
    """`137=` is answered by 137 ones."""
    return functools.partial(problem, shortest=shortest, longest=longest, digits=3)


@dataclasses.dataclass(frozen=True)
class Workload:
    """A task, a model for it, and how each side is set for them."""

    name: str
    problem: Callable[[Random], tuple[str, str]]
    longest: int  # characters of an answer
    model: dict[str, Any]  # of make_demo_model
    steps: int
    reward: float
    in_flight: int  # H of our engine
    threads: int  # of TRL: what is faster; ours has an engine and a rank with one thread each
    goal: float
    lr: float = 4e-4
    gradient_clipping: float = 0.1
    right: float = 0.25  # share of right answers in what the start model is taught

    def form(self, rng: Random) -> tuple[str, str]:
        """What the start model is taught: answers of the right form, some of them right."""
        prompt, answer = self.problem(rng)
        return prompt, answer if rng.random() < self.right else self.problem(rng)[1]


WORKLOADS = (
    Workload("91k parameters, 5 tokens", copy, 4, {"steps": 40}, 192, 0.5, 128, 1, 0.5, 1e-3, 1.0, 1.0),
    Workload("91k parameters, 2 to 200 tokens", unary(2, 199), 199, {"context": 256}, 96, 0.5, 96, 2, 2.0),
    Workload("11M parameters, 16 to 256 tokens", unary(16, 255), 255,
             {"context": 320, "hidden": 384, "layers": 8, "heads": 6, "steps": 40, "batch": 16, "lr": 5e-4}, 12, 0.5, 64, 2, 2.5),
)


def environment() -> Path:
    """TRL's Python; made at the first use."""
    python = (ENVIRONMENT / "bin" / "python").absolute()
    if not python.exists():
        packages = [f"trl=={TRL}", *(f"{name}=={version(name)}" for name in ("torch", "transformers"))]
        newest = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["exclude-newer"]
        uv = shutil.which("uv") or str(ROOT / ".uv" / "bin" / "uv")
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(ENVIRONMENT)], check=True)
        try:
            subprocess.run([uv, "pip", "install", "--quiet", "--python", str(python), "--exclude-newer", newest, *packages], check=True)
        except BaseException:
            shutil.rmtree(ENVIRONMENT)
            raise
    return python


def theirs(python: Path, w: Workload, model: str, prompts: Path, seed: int, steps: int) -> Curve:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps({
            "model": model, "prompts": str(prompts), "folder": folder, "seed": seed, "steps": steps, "samples": BATCH, "group_size": GROUP_SIZE,
            "max_tokens": w.longest + 1, "lr": w.lr, "betas": BETAS, "gradient_clipping": w.gradient_clipping, "warmup_steps": WARMUP, "threads": w.threads}))
        done = subprocess.run([str(python), "-m", "tests.benchmarks.trl_side", str(config)], cwd=ROOT, capture_output=True, text=True,
                              env={**os.environ, "OMP_NUM_THREADS": str(w.threads), "HF_HUB_OFFLINE": "1"})
    if done.returncode:
        raise RuntimeError(f"TRL ended with exit status {done.returncode}: {done.stderr[-3000:]}")
    made = json.loads(done.stdout.splitlines()[-1])
    return curve_of([tuple(r) for r in made["rollouts"]], [(at, 0.0, 1.0) for at in made["steps"]], BATCH, WINDOW)


def flags(w: Workload, model: str, seed: int, steps: int) -> dict[str, Any]:
    return COMMON | {
        "run.max_steps": steps, "run.seed": seed, "model.path": model, "reference.enabled": "false",
        "generation.batch": w.in_flight, "generation.max_tokens": w.longest + 1, "generation.max_model_len": w.longest + 16,
        "generation.kv_cache_mb": 256, "grouping.timeout_s": 600, "grouping.zero_variance": "train",
        "training.batch": BATCH, "training.max_lag": MAX_LAG, "training.lr": w.lr, "training.warmup_steps": WARMUP,
        "training.gradient_clipping": w.gradient_clipping, "training.checkpoint_every": steps,
    }


def run(*, quick: bool = False) -> None:
    from deploy.models import make_demo_model
    from jobs.prompts import load_prompts

    on, python = machine(), environment()
    rounds = 1 if quick else 3
    curves: dict[str, dict[str, list[Curve]]] = {w.name: {OURS: [], THEIRS: []} for w in WORKLOADS}
    with local_stack() as stack:
        for w in WORKLOADS:
            steps = max(4, w.steps // 4) if quick else w.steps
            for seed in range(rounds):
                ident = f"{w.name.split(',')[0].replace(' ', '-')}-{w.longest}-{seed}"
                model = str(make_demo_model(stack.runs / f"model-{ident}", seed, form=w.form, **w.model))
                prompts, rng = stack.runs / f"prompts-{ident}.jsonl", Random(seed)
                prompts.write_text("".join(json.dumps(dict(zip(("prompt", "answer"), w.problem(rng), strict=True))) + "\n" for _ in range(PROMPTS)))
                settings = stack.settings(ident, **flags(w, model, seed, steps))
                curves[w.name][OURS].append(learned(settings, lambda s, source=prompts: load_prompts(s, str(source), task="characters")))
                curves[w.name][THEIRS].append(theirs(python, w, model, prompts, seed, steps))
                for side, found in curves[w.name].items():
                    print(f"{w.name}, seed {seed}, {side}: {found[-1].samples_per_s:.1f} samples/s, reward {found[-1].reward[0]:.3f} -> "
                          f"{found[-1].reward[-1]:.3f}", flush=True)
    value, measures = compare(curves)
    report("trl", value, measures,
           sides={f"{w}: {side}": [dataclasses.asdict(c.thin(200)) for c in found] for w, both in curves.items() for side, found in both.items()},
           settings={"quick": quick, "trl": TRL, "batch": BATCH, "max_lag": MAX_LAG, "window": WINDOW,
                     "workloads": [{k: v for k, v in dataclasses.asdict(w).items() if k != "problem"} for w in WORKLOADS]},
           seeds={"first": 0, "count": rounds}, on=on)


def compare(curves: dict[str, dict[str, list[Curve]]]) -> tuple[Measure, list[Measure]]:
    """(the ratio of samples/s of the last workload, everything else)."""
    value, measures = None, []
    for w in WORKLOADS:
        made = curves[w.name]
        speed = {side: [c.samples_per_s for c in found] for side, found in made.items()}
        value = ratio(f"{w.name}: samples/s, {OURS} ÷ {THEIRS}", speed[OURS], speed[THEIRS], w.goal)
        measures += [value, *(mean(f"{w.name}: {side}", values, "samples/s") for side, values in speed.items())]
        reached = {side: [c.reach(w.reward) for c in found] for side, found in made.items()}
        for side, found in reached.items():
            measures.append(Measure(f"{w.name}: {side}: seeds that reached {w.reward:g}", sum(r is not None for r in found), "", n=len(found)))
        if not any(None in found for found in reached.values()):
            for kind, unit in ((0, "samples"), (1, "seconds")):
                measures.append(ratio(f"{w.name}: {unit} to {w.reward:g}, {OURS} ÷ {THEIRS}", *([r[kind] for r in reached[s]] for s in (OURS, THEIRS))))
    return value, [m for m in measures if m is not value]
