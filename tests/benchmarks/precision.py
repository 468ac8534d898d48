"""precision: what engine and trainer disagree on at equal weights, by dtype of model, output layer and KV cache, and what it costs.

SmolLM2-135M answers prompts through the pipeline's own engine (`pipelinerl eval`); the sampled tokens are then scored by the forward pass of
trainer and reference with the same weights. What is left between the two log-probabilities is the mismatch that `mismatch/kl` and
`mismatch/abs_mean` show in a run. Sides take turns, a fresh engine process each time.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from schemas.settings import ModelSettings
from tests.benchmarks.common import machine, mean, ratio, report

SIDES = {
    "bfloat16": {},
    "bfloat16, output layer in float32": {"model.head_dtype": "float32"},
    "bfloat16, KV cache in fp8": {"generation.kv_cache_dtype": "fp8"},
    "float32": {"generation.dtype": "float32"},
}
PAIR = "bfloat16, output layer in float32", "bfloat16"
COMMON = {"generation.dtype": "bfloat16", "generation.chat_template": "true", "generation.batch": 16, "generation.max_model_len": 256,
          "generation.kv_cache_mb": 256}


def mismatch(model: Path, file: Path, flags: dict[str, str]) -> dict[str, float]:
    """Of the answers in a file of `pipelinerl eval`, over their sampled tokens: log-ratios trainer - engine, and tokens/s of the engine."""
    import pyarrow.parquet as pq

    from operators.reference_child import Reference

    rollouts = pq.read_table(file)
    reference = Reference(ModelSettings(path=str(model), head_dtype=flags.get("model.head_dtype", "model")), dtype=flags["generation.dtype"],
                          attention="sdpa", token_budget=2048, device="cpu")
    scored, = reference.score([rollouts])
    engine, trainer = (scored.column(n).combine_chunks().flatten().to_numpy(zero_copy_only=False) for n in ("rollout_logprobs", "ref_logprobs"))
    log_ratio = (trainer - engine)[np.isfinite(engine)].astype(np.float64)
    began, ended = (rollouts.column(n).to_numpy() for n in ("dispatched_at", "finished_at"))
    return {"abs_mean": float(np.abs(log_ratio).mean()), "abs_max": float(np.abs(log_ratio).max()),
            "kl": float((np.exp(log_ratio) - log_ratio - 1).mean()), "tokens": len(log_ratio),
            "tokens_per_s": len(log_ratio) / ((ended.max() - began.min()) / np.timedelta64(1, "s"))}


def run(*, quick: bool = False) -> None:
    from deploy.models import make_in_process

    on = machine()
    rounds, prompts, samples, tokens = (1, 8, 2, 32) if quick else (3, 16, 4, 64)
    model = Path(make_in_process("smollm2"))
    made: dict[str, list[dict[str, float]]] = {name: [] for name in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        for i in range(rounds):
            for name, own in SIDES.items():
                flags = COMMON | own | {"generation.max_tokens": tokens, "run.seed": i}
                file = Path(folder) / "rollouts.parquet"
                command = [sys.executable, "-m", "jobs.cli", "eval", str(model), "--prompts", "reasoning_gym:chain_sum", "--size", str(prompts),
                           "--prompt-seed", str(i), "--samples", str(samples), "--to", str(file), *(f"--{k}={v}" for k, v in flags.items())]
                done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
                if done.returncode:
                    raise RuntimeError(f"{name}: pipelinerl eval ended with exit status {done.returncode}: {done.stderr[-2000:]}")
                made[name].append(mismatch(model, file, flags))
                print(f"{name}: " + ", ".join(f"{k} {v:.3g}" for k, v in made[name][-1].items()), flush=True)
    measures = []
    for name, rows in made.items():
        measures += [mean(f"{name}: |log-probability of trainer - of engine|, mean over tokens", [r["abs_mean"] for r in rows], "nats"),
                     mean(f"{name}: the same, largest", [r["abs_max"] for r in rows], "nats"),
                     mean(f"{name}: mismatch/kl", [r["kl"] for r in rows], "nats"),
                     mean(f"{name}: engine", [r["tokens_per_s"] for r in rows], "tokens/s")]
    ours, bare = ([r["abs_mean"] for r in made[n]] for n in PAIR)
    report("precision", ratio(f"mean mismatch: {PAIR[0]} ÷ {PAIR[1]}", ours, bare), measures, sides=made,
           settings={"quick": quick, "prompts": prompts, "samples": samples, "tokens": tokens, "common": COMMON, "sides": SIDES},
           seeds={"first": 0, "count": rounds}, on=on)
