"""weight_sync: what travels when a version is published, full and as a lossless delta, and what making and applying it costs.

SmolLM2-135M in bfloat16 with float32 master weights takes reinforcement steps with `operators.trainer.Trainer` on its own samples
(arithmetic prompts, groups of eight, a reward for digits, leave-one-out advantages), at two learning rates from the same start. Each
version is published as the train job does it and loaded as an engine does it; a delta that does not make the trainer's bytes fails.

Beside them what int8 (symmetric, a scale a row) would hide of an update: its error as a KL divergence between next-token distributions, held
against that of the update itself. It is no encoding of the pipeline's: this is why.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from pathlib import Path
from typing import Any

from schemas.settings import Settings
from tests.benchmarks.common import Measure, machine, mean, report, sampled, step_of_rows

GOAL = 0.005
GROUP, RESPONSE, LEARNING_RATES = 8, 24, (1e-6, 1e-5)


@dataclasses.dataclass(frozen=True)
class Sample:
    """A sampled answer with its log-probabilities; `reward` is the share of digits among its characters."""

    prompt: list[int]
    response: list[int]
    logprobs: list[float]
    reward: float


def sample(model: Path, groups: int, seed: int) -> list[list[Sample]]:
    """Groups of samples of the start model, at temperature 1."""
    import torch
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    questions = (f"What is {17 * i % 90 + 10} + {29 * i % 90 + 10}?" for i in range(groups))
    out = []
    for prompt, made in sampled(model, questions, RESPONSE, seed=seed, answers=GROUP, output_logits=True):
        tokens = made.sequences[:, len(prompt):]
        logprobs = torch.stack(made.logits, 1).float().log_softmax(-1).gather(2, tokens[..., None])[..., 0]
        texts = tokenizer.batch_decode(tokens)
        out.append([Sample(prompt, t, p, sum(c.isdigit() for c in text) / max(1, len(text)))
                    for t, p, text in zip(tokens.tolist(), logprobs.tolist(), texts, strict=True)])
    return out


def step_of(number: int, groups: list[list[Sample]], budget: int) -> tuple[Any, list]:
    """(manifest, tables) of a step, as the sequencer makes them."""
    from operators.grouping import row_of
    from tests.records import rollout, table

    rows = []
    for g, members in enumerate(groups):
        total = sum(s.reward for s in members)
        for i, s in enumerate(members):
            n, start = len(s.prompt) + len(s.response), len(s.prompt)
            row, outcome, cause = row_of(table(rollout(
                g, i, size=GROUP, version=number - 1, reward=s.reward, prompt_length=start, response=n - start,
                token_ids=s.prompt + s.response, rollout_logprobs=[None] * start + s.logprobs)))
            assert outcome is None, cause
            rows.append((row, s.reward - (total - s.reward) / (GROUP - 1)))
    return step_of_rows(number, rows, budget)


class Divergence:
    """KL(p || q), nats a token, between the next-token distributions that two versions give on the same texts."""

    def __init__(self, model: str, texts: list[list[int]]):
        import torch
        from transformers import AutoModelForCausalLM

        self._network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._texts = texts

    def logprobs(self, tensors: dict[str, Any]) -> Any:
        import torch

        self._network.load_state_dict(tensors, strict=False)
        with torch.inference_mode():
            return torch.cat([self._network(torch.tensor([t])).logits[0].float().log_softmax(-1) for t in self._texts])

    @staticmethod
    def kl(p: Any, q: Any) -> float:
        return float((p.exp() * (p - q)).sum(-1).mean())


def int8(tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(codes, what a generator would hold) of matrices, symmetric with a scale a row; everything else stays as it is."""
    import torch

    codes, held = {}, dict(tensors)
    for name, t in tensors.items():
        if t.dim() == 2:
            scale = t.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
            codes[name] = (t.float() / scale).round().to(torch.int8)
            held[name] = (codes[name].float() * scale).to(t.dtype)
    return codes, held


def published(settings: Settings, batches: list[list[list[Sample]]]) -> list[dict[str, float]]:
    """One entry a version: bytes of both forms and the seconds of each part."""
    import torch

    from operators import weights
    from operators.loader import WeightFiles
    from operators.trainer import Trainer

    trainer = Trainer(settings)
    generator = WeightFiles(settings.model.path, settings.generation.dtype)
    deltas = weights.Deltas(full_every=1 << 30)
    event = deltas.stage(trainer.stage_weights(), 0, None).offer(0, 0, "benchmark")
    before = {n: t.clone() for n, t in _load(generator, event)[0].items()}
    divergence = Divergence(settings.model.path, [s.prompt + s.response for s in batches[0][0][:4]])
    old, (old_codes, old_held) = divergence.logprobs(before), int8(before)
    old_int8 = divergence.logprobs(old_held)
    found = []
    for number, groups in enumerate(batches, 1):
        metrics = trainer.train(*step_of(number, groups, settings.packing.token_budget))
        began, used = time.perf_counter(), time.process_time()
        full = trainer.stage_weights()
        staged, staged_cpu = time.perf_counter() - began, time.process_time() - used
        size = full.size
        began, used = time.perf_counter(), time.process_time()
        event = deltas.stage(full, number, event).offer(0, number, "benchmark")
        made, made_cpu = time.perf_counter() - began, time.process_time() - used
        tensors, phases = _load(generator, event)  # raises if the bytes are not the trainer's: the event has their digest
        changed = sum(int((tensors[n] != before[n]).sum()) for n in tensors) / sum(t.numel() for t in tensors.values())
        before = {n: t.clone() for n, t in tensors.items()}
        new, (codes, held) = divergence.logprobs(before), int8(before)
        new_int8 = divergence.logprobs(held)
        hidden = {"kl_update": divergence.kl(new, old), "kl_int8": divergence.kl(new, new_int8),
                  "kl_update_int8": divergence.kl(new_int8, old_int8),
                  "codes_changed": sum(int((codes[n] != old_codes[n]).sum()) for n in codes) / sum(c.numel() for c in codes.values())}
        old, old_codes, old_int8 = new, codes, new_int8
        base = memoryview(weights.read(weights.by_handle(generator._held[1])))
        began = time.perf_counter()
        bytearray(base)
        copied = time.perf_counter() - began
        assert event.encoding == "delta" and torch.isfinite(torch.tensor(metrics["loss"]))
        found.append({"full": size, "delta": event.bytes, "changed": changed, "stage_s": staged, "stage_cpu_s": staged_cpu,
                      "delta_s": made, "delta_cpu_s": made_cpu, "fetch_ms": phases["fetch"], "decode_ms": phases["decode"],
                      "copy_ms": 1000 * copied, **hidden})
        print(f"  version {number}: {event.bytes:,} of {size:,} bytes ({100 * event.bytes / size:.2f} %), {100 * changed:.2f} % of the "
              f"values changed, made in {made:.2f} s; KL of the update {hidden['kl_update']:.2e}, of int8 {hidden['kl_int8']:.2e}", flush=True)
    return found


def _load(generator: Any, event: Any) -> tuple[dict[str, Any], dict[str, float]]:
    loaded, phases = generator.load(event)
    tensors = dict(loaded.tensors)
    loaded.close()
    return tensors, phases


def run(*, quick: bool = False) -> None:
    from deploy.models import make_in_process
    from operators import rendezvous

    on = machine()
    steps, a_step = (3, 2) if quick else (20, 2)
    sides: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="pipelinerl-benchmark-") as name:
        folder = Path(name)
        model = make_in_process("smollm2")
        print(f"sampling {steps * a_step} groups of {GROUP} ...", flush=True)
        groups = sample(Path(model), steps * a_step, 0)
        batches = [groups[i * a_step:(i + 1) * a_step] for i in range(steps)]
        rendezvous.join(Settings(run={"id": "benchmark", "dir": folder}), 0, 1, "cpu")
        try:
            for lr in LEARNING_RATES:
                print(f"{steps} steps at lr {lr:g} ...", flush=True)
                settings = Settings(
                    run={"id": f"lr-{lr:g}", "dir": folder}, model={"path": str(model)}, generation={"dtype": "bfloat16"},
                    packing={"token_budget": 1024}, training={"dtype": "bfloat16", "lr": lr, "device": "cpu", "batch": a_step * GROUP})
                sides[f"lr {lr:g}"] = published(settings, batches)
        finally:
            rendezvous.leave()
    measures: list[Measure] = []
    for lr, made in sides.items():
        measures += [
            mean(f"{lr}: bytes of a delta ÷ bytes in full", [m["delta"] / m["full"] for m in made], "ratio",
                 GOAL if lr == "lr 1e-06" else None, at_most=True),
            mean(f"{lr}: share of values that changed", [m["changed"] for m in made], "ratio"),
            mean(f"{lr}: bytes of a delta", [m["delta"] / 1e6 for m in made], "MB"),
            mean(f"{lr}: writing and hashing a version in full", [1000 * m["stage_cpu_s"] for m in made], "ms CPU"),
            mean(f"{lr}: making the delta, besides", [1000 * m["delta_cpu_s"] for m in made], "ms CPU"),
            mean(f"{lr}: generator: fetching and applying the delta", [m["fetch_ms"] for m in made], "ms"),
            mean(f"{lr}: generator: checking digest and layout", [m["decode_ms"] for m in made], "ms"),
            mean(f"{lr}: copying a version's bytes once", [m["copy_ms"] for m in made], "ms"),
            mean(f"{lr}: KL of an update", [m["kl_update"] for m in made], "nats"),
            mean(f"{lr}: KL of rounding a version to int8", [m["kl_int8"] for m in made], "nats"),
            mean(f"{lr}: int8 codes that an update changes", [m["codes_changed"] for m in made], "ratio"),
        ]
    report("weight_sync", measures[0], measures[1:], sides=sides, settings={"quick": quick, "steps": steps, "samples a step": a_step * GROUP},
           seeds={"sampling": 0}, on=on)
