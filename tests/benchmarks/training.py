"""training: what the trainer makes of DeepSpeed's speed, and how full its micro-batches are.

One process, one rank. The product's side is `operators.trainer.Trainer.train` on the tables of a step as they lie in the log: reading the
Arrow columns, forward, loss, measures, backward, step. The bare side is a loop by hand on the same sequences, packed beforehand: the same
model with the same attention, the same loss and optimizer, no measures. They take the same steps in turns; publication, which follows a
step in the train job, is timed apart. Tokens are all tokens of the packed rows.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
import random
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from operators.packing import pack
from schemas.settings import Settings
from tests.benchmarks.common import Measure, alternate, machine, mean, ratio, report, step_of_rows

SEED = 0
GOAL, FILL_GOAL = 0.98, 0.97


@dataclasses.dataclass(frozen=True)
class Case:
    """A model; a step has `sequences` rows of prompt + `shortest` to `longest` tokens, log-uniform."""

    name: str
    sequences: int
    prompt: int
    shortest: int
    longest: int
    budget: int
    rounds: int
    dtype: str
    lr: float


CASES = (
    Case("tiny", 128, 4, 2, 48, 1024, 16, "float32", 5e-4),
    Case("SmolLM2-135M", 24, 24, 16, 96, 1024, 8, "bfloat16", 1e-6),
)


def fill(lengths: list[int], budget: int) -> float:
    """Tokens of the packed sequences ÷ what their micro-batches could hold."""
    return sum(lengths) / (len(pack(lengths, budget)) * budget)


def uniform(draw: random.Random, low: int, high: int) -> int:
    return draw.randint(low, high)


def log_uniform(draw: random.Random, low: int, high: int) -> int:
    return min(high, int(math.exp(draw.uniform(math.log(low), math.log(high + 1)))))


def fills(seeds: int) -> list[Measure]:
    """Packing fill over length distributions, a step a seed."""
    out = []
    for name, of, low, high, batch, budget, goal in (
            ("uniform 32 to 2048 tokens, B 1024, budget 8192", uniform, 32, 2048, 1024, 8192, FILL_GOAL),
            ("log-uniform 32 to 8192 tokens, B 1024, budget 8192", log_uniform, 32, 8192, 1024, 8192, FILL_GOAL),
            ("uniform 128 to 512 tokens, B 128, budget 8192", uniform, 128, 512, 128, 8192, None)):
        values = []
        for seed in range(seeds):
            draw = random.Random(seed)
            values.append(fill([of(draw, low, high) for _ in range(batch)], budget))
        out.append(mean(f"packing fill: {name}", values, "ratio", goal))
    return out


def step_of(case: Case, number: int, vocabulary: int) -> tuple[Any, list, int]:
    """(manifest, tables of the sequence schema packed by the budget, tokens) of step `number`."""
    from operators.grouping import row_of
    from tests.records import rollout, table

    draw = np.random.default_rng(SEED)  # the same step each time: rounds differ by nothing but their versions
    lengths_of = random.Random(SEED)
    rows = []
    for i in range(case.sequences):
        response = log_uniform(lengths_of, case.shortest, case.longest)
        n = case.prompt + response
        row, outcome, cause = row_of(table(rollout(
            i // 8, i % 8, size=8, version=number - 1, reward=float(draw.random() < 0.5), prompt_length=case.prompt, response=response,
            token_ids=draw.integers(3, vocabulary, n).tolist(),
            rollout_logprobs=[None] * case.prompt + (-3 * draw.random(response)).tolist())))
        assert outcome is None, cause
        rows.append((row, float(draw.normal())))
    manifest, tables = step_of_rows(number, rows, case.budget)
    return manifest, tables, manifest.tokens


class Product:
    """The trainer and, timed apart, the publication of what it made."""

    def __init__(self, settings: Settings, case: Case):
        from operators.trainer import Trainer

        self._case = case
        self.trainer = Trainer(settings)

    def __call__(self, _: int) -> dict[str, float]:
        from operators import microbatch

        manifest, tables, tokens = step_of(self._case, self.trainer.version + 1, self.trainer.module.config.vocab_size)
        began = time.perf_counter()
        for table in tables:
            microbatch.read(table)
        reading = time.perf_counter() - began
        began, used = time.perf_counter(), time.process_time()
        metrics = self.trainer.train(manifest, tables)
        seconds, used = time.perf_counter() - began, time.process_time() - used
        staged = self.trainer.stage_weights()
        event = staged.offer(0, manifest.step, "benchmark")
        published = time.perf_counter() - began - seconds
        self.trainer.prune_weights({event.version})
        return {"tokens": tokens, "seconds": seconds, "cpu_s": used, "reading_s": reading, "publication_s": published,
                "loss": metrics["loss"], "grad_norm": metrics["grad_norm"]}


class Bare:
    """A DeepSpeed loop by hand: REINFORCE with truncated importance weights over packed rows."""

    def __init__(self, settings: Settings, case: Case):
        import deepspeed
        import torch

        from operators import microbatch
        from operators.forward import load_model
        from operators.trainer import deepspeed_config

        t = settings.training
        self._clip, self._torch = t.loss.importance_weight_clip, torch
        model = load_model(settings.model, dtype=t.dtype, attention=t.attention)
        optimizer = torch.optim.AdamW(model.parameters(), lr=t.lr, betas=t.betas, weight_decay=t.weight_decay, fused=True)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=deepspeed_config(settings, sum(p.numel() for p in model.parameters())))
        self.engine.module.train()
        manifest, tables, self._tokens = step_of(case, 1, model.config.vocab_size)
        self._batches = [microbatch.read(t) for t in tables]
        self._sequences = manifest.sequences

    def __call__(self, _: int) -> dict[str, float]:
        torch = self._torch
        began, used = time.perf_counter(), time.process_time()
        total = 0.0
        for i, batch in enumerate(self._batches):
            self.engine.set_gradient_accumulation_boundary(i == len(self._batches) - 1)
            p = batch.packed
            logits = self.engine(input_ids=p.token_ids, position_ids=p.position_ids, attention_mask=None, use_cache=False,
                                 packing=p.packing, logits_to_keep=p.targets - 1).logits[0]
            new = -torch.nn.functional.cross_entropy(logits.float() / p.temperature[:, None], p.token_ids[0, p.targets], reduction="none")
            weight = (new.detach() - batch.behaviour).exp().clamp(max=self._clip)
            loss = -(weight * batch.advantage * new).sum() / self._sequences
            self.engine.backward(loss, scale_wrt_gas=False)
            total += float(loss.detach())
        self.engine.step()
        return {"tokens": self._tokens, "seconds": time.perf_counter() - began, "cpu_s": time.process_time() - used, "loss": total,
                "grad_norm": float(self.engine.get_global_grad_norm())}


def measure(case: Case, model: Path, folder: Path, rounds: int) -> tuple[list[Measure], dict[str, Any], dict[str, Any]]:
    """(measures, the first of which is the ratio; the sides' rounds; the settings) of a case."""
    settings = Settings(
        run={"id": f"benchmark-{case.dtype}", "dir": folder}, model={"path": str(model)}, generation={"dtype": case.dtype},
        packing={"token_budget": case.budget},
        training={"dtype": case.dtype, "lr": case.lr, "device": "cpu", "batch": case.sequences})
    product, bare = Product(settings, case), Bare(settings, case)
    print(f"{case.name}: {rounds} rounds of {case.sequences} sequences a side ...", flush=True)
    first = product(0), bare(0)  # warm-up, and the check that both do the same
    for key in ("loss", "grad_norm"):
        ours, theirs = first[0][key], first[1][key]
        if not math.isclose(ours, theirs, rel_tol=1e-3 if case.dtype == "float32" else 2e-2):
            raise RuntimeError(f"the sides do not do the same: {key} {ours} and {theirs}")

    def shown(name: str, side):
        def turn(i: int) -> dict[str, float]:
            made = side(i)
            print(f"  {made['tokens'] / made['seconds']:,.0f} tokens/s ({name})", flush=True)
            return made
        return turn

    sides = alternate({"trainer": shown("trainer", product), "bare": shown("bare", bare)}, rounds)
    speed = {name: [r["tokens"] / r["seconds"] for r in made] for name, made in sides.items()}
    ours = sides["trainer"]
    label = case.name
    measures = [
        ratio(f"{label}: trainer ÷ bare loop, tokens/s", speed["trainer"], speed["bare"], GOAL),
        ratio(f"{label}: trainer ÷ bare loop, tokens a CPU second", *([r["tokens"] / r["cpu_s"] for r in sides[n]] for n in speed)),
        mean(f"{label}: trainer", speed["trainer"], "tokens/s"), mean(f"{label}: bare DeepSpeed loop", speed["bare"], "tokens/s"),
        mean(f"{label}: a step longer than a bare one by", [1000 * (a["seconds"] - b["seconds"]) for a, b in zip(ours, sides["bare"], strict=True)],
             "ms"),
        mean(f"{label}: reading a step's Arrow columns (in the step)", [1000 * r["reading_s"] for r in ours], "ms"),
        mean(f"{label}: publication of a step's weights (after it)", [1000 * r["publication_s"] for r in ours], "ms"),
        mean(f"{label}: publication, share of step and publication",
             [r["publication_s"] / (r["seconds"] + r["publication_s"]) for r in ours], "ratio"),
    ]
    del product, bare
    gc.collect()
    return measures, {f"{label}, {name}": made for name, made in sides.items()}, dataclasses.asdict(case) | {"rounds": rounds}


def run(*, quick: bool = False) -> None:
    from deploy.models import make_in_process
    from operators import rendezvous

    on = machine()
    found: dict[str, list[Measure]] = {}
    sides: dict[str, Any] = {}
    settings: dict[str, Any] = {"quick": quick}
    with tempfile.TemporaryDirectory(prefix="pipelinerl-benchmark-") as name:
        folder = Path(name)
        models = {"tiny": make_in_process("demo", folder / "tiny", SEED), "SmolLM2-135M": make_in_process("smollm2")}
        rendezvous.join(Settings(run={"id": "benchmark", "dir": folder}), 0, 1, "cpu")
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # its import sets another one
        try:
            for case in CASES:
                found[case.name], made, settings[case.name] = measure(case, models[case.name], folder, 2 if quick else case.rounds)
                sides |= made
        finally:
            rendezvous.leave()
    value, *more = found["SmolLM2-135M"] + found["tiny"]
    report("training", value, more + fills(2 if quick else 10), sides=sides, settings=settings,
           seeds={"sequences": SEED, "packing": 10}, on=on)
