"""kv_modes: what becomes of the KV cache when weights change under it (`generation.kv_cache_mode`), and what that costs.

SmolLM2-135M in float32 under versions that reinforcement steps made beforehand (weight_sync's), one every `EVERY` engine steps, in the engine's own
loop with its loader, alone in this process. The modes take turns on the same prompts, groups of eight that share a prompt of more than a block.

Throughput counts sampled tokens from the first one to the last, pauses and recomputation included. KL divergences are over the tokens that
were sampled after their sequence met its first update, k3 estimates in nats a token: of what was sampled from the policy that a token's version is on
a cache of its own (what the stale cache adds), and from that of the newest version the sequence met (what the mixture as a whole adds). Both are
reckoned by transformers, in float32.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from schemas.records import Ack, Dispatch, Rollout, Weights, now
from schemas.settings import GenerationSettings, ModelSettings, Settings
from tests.benchmarks.common import Measure, alternate, machine, mean, ratio, report

MODES = ("reuse", "reuse_partial", "recompute")
LEARNING_RATE, EVERY, VERSIONS, A_STEP = 1e-5, 24, 8, 2
GENERATION = GenerationSettings(batch=16, max_tokens=48, max_model_len=320, dtype="float32", kv_cache_mb=512, temperature=1.0)
EXAMPLES = "".join(f"What is {a} + {b}? {a} + {b} = {a + b}. " for a, b in ((31 * i % 89 + 10, 47 * i % 83 + 10) for i in range(10)))


def question(i: int) -> str:
    return f"{EXAMPLES}What is {17 * i % 90 + 10} + {29 * i % 90 + 10}?"


def trained(model: Path, folder: Path) -> list[Weights]:
    """The events of versions 0 to VERSIONS, in float32."""
    from operators import rendezvous
    from operators.trainer import Trainer
    from tests.benchmarks.weight_sync import sample, step_of

    groups = sample(model, VERSIONS * A_STEP, 0)
    settings = Settings(run={"id": "versions", "dir": folder}, model={"path": str(model)}, generation={"dtype": "float32"},
                        packing={"token_budget": 1024},
                        training={"dtype": "float32", "lr": LEARNING_RATE, "device": "cpu", "batch": A_STEP * len(groups[0])})
    rendezvous.join(settings, 0, 1, "cpu")
    try:
        trainer = Trainer(settings)
        events = [trainer.stage_weights().offer(0, 0, "versions")]
        for number in range(1, VERSIONS + 1):
            trainer.train(*step_of(number, groups[(number - 1) * A_STEP:number * A_STEP], settings.packing.token_budget))
            events.append(trainer.stage_weights().offer(0, number, "versions"))
            print(f"  version {number}", flush=True)
    finally:
        rendezvous.leave()
    return events


class Side:
    """Rounds of a mode."""

    def __init__(self, engine: Any, model: str, events: list[Weights], mode: str, groups: int):
        self._engine, self._model, self._events, self._mode, self._groups = engine, model, events, mode, groups

    def __call__(self, _: int) -> dict[str, Any]:
        from operators.engine import EngineLoop, prepared
        from operators.engine_frames import ACK, RESULT, unpack_result
        from operators.loader import Loader, WeightFiles
        from operators.rollouts import Rollouts, tokenizer_digest
        from operators.weights import BadWeights
        from schemas.record import decode, encode
        from tests.records import prompt

        engine, rollouts, acks, cached = self._engine, [], [], []

        def send(kind: int, payload: bytes) -> None:
            if kind == RESULT:
                rollouts.extend(decode(Rollout, unpack_result(payload)[2]))
            elif kind == ACK:
                acks.extend(decode(Ack, payload))

        makes = Rollouts(GENERATION.model_copy(update={"kv_cache_mode": self._mode}), run_id="r", generator_id="g", engine=engine.name,
                         tokenizer=engine.tokenizer, tokenizer_digest=tokenizer_digest(self._model), stop_ids=frozenset())
        loader = Loader(prepared(WeightFiles(self._model, GENERATION.dtype), engine), (BadWeights,), lambda: None)
        loop = EngineLoop(engine, makes, loader, send, run_id="r", generator_id="g", capacity=GENERATION.batch, max_lag=10**6,
                          kv_cache_mode=self._mode)
        step = engine._llm.step

        def noting() -> list:
            outputs = step()
            cached.extend((o.num_cached_tokens or 0, len(o.prompt_token_ids)) for o in outputs if o.finished)
            return outputs

        engine._llm.step = noting
        try:
            engine.reset_cache()
            loop.offer(self._events[0], time.time())
            loop.serve()
            while not acks:
                loop.turn()
                time.sleep(0.001)
            samples = [(g, i) for g in range(self._groups) for i in range(8)]
            for n, (g, i) in enumerate(samples):
                loop.submit(f"{n}", 0, encode([Dispatch(
                    admission=n, group_id=f"d/0/{g}", sample_index=i, group_size=8, attempt=0, min_version=0, policy_version=0,
                    prompt=encode([prompt(g, prompt=question(g))]), dispatched_at=now())]))
            began, offers = time.time(), iter(self._events[1:])
            for turn in itertools.count(1):
                loop.turn()
                if turn % EVERY == 0 and (event := next(offers, None)) is not None:
                    loop.offer(event, time.time())
                if len(rollouts) == len(samples):
                    break
            seconds = time.time() - began
        finally:
            engine._llm.step = step
        applied = [dict(a.phases_ms)["apply"] for a in acks[1:]]
        if bad := [a for a in acks if a.status != "applied"] + [r for r in rollouts if r.finish_reason not in ("stop", "length")]:
            raise RuntimeError(f"{self._mode}: {bad[0]}")
        tokens = sum(len(r.token_ids) - r.prompt_length for r in rollouts)
        print(f"  {self._mode}: {tokens / seconds:.0f} tokens/s, {len(applied)} updates", flush=True)
        return {"tokens": tokens, "seconds": seconds, "updates": len(applied), "pause_ms": sum(applied) / len(applied),
                "hits": sum(c for c, _ in cached) / sum(n for _, n in cached), "rollouts": rollouts}


def divergences(rollouts: list[Rollout], policies: dict[int, Any], most: int) -> dict[str, float]:
    """{"stale cache": k3, "mixture": k3, "tokens": count}; policies: version -> transformers' model. At most so many sequences are looked at."""
    import torch

    def k3(mine: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        log_ratio = (other - mine).double()
        return log_ratio.exp() - log_ratio - 1

    found: dict[str, list[torch.Tensor]] = {"stale cache": [], "mixture": []}
    crossing = [r for r in rollouts if len(r.version_spans) > 1]
    for r in crossing[::max(1, -(-len(crossing) // most))]:
        spans, ids = r.version_spans, torch.tensor([r.token_ids])
        starts = [s["start"] for s in spans]
        behaviour = torch.tensor([x if x is not None else float("nan") for x in r.rollout_logprobs])
        with torch.inference_mode():
            by_version = {s["policy_version"]: torch.log_softmax(policies[s["policy_version"]](ids).logits[0, :-1].float(), -1)
                          .gather(1, ids[0, 1:, None])[:, 0] for s in spans}
        newest = by_version[spans[-1]["policy_version"]]
        for span, end in list(zip(spans, [*starts[1:], len(r.token_ids)], strict=True))[1:]:
            at = slice(span["start"], end)
            before = slice(span["start"] - 1, end - 1)
            found["stale cache"].append(k3(behaviour[at], by_version[span["policy_version"]][before]))
            found["mixture"].append(k3(behaviour[at], newest[before]))
    return {name: float(torch.cat(values).mean()) for name, values in found.items()} | {"tokens": sum(map(len, found["mixture"]))}


def run(*, quick: bool = False) -> None:
    from deploy.models import make_in_process

    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING", "VLLM_NO_USAGE_STATS": "1",
                   "VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    on = machine()
    rounds, groups, scored = (1, 6, 12) if quick else (3, 8, 24)
    model = make_in_process("smollm2")
    with tempfile.TemporaryDirectory(prefix="pipelinerl-benchmark-") as folder:
        print(f"{VERSIONS} versions ...", flush=True)
        events = trained(Path(model), Path(folder))
        from transformers import AutoModelForCausalLM

        from operators import weights
        from operators.vllm_engine import VLLMEngine

        engine = VLLMEngine(GENERATION, ModelSettings(path=str(model)))
        sides = alternate({mode: Side(engine, str(model), events, mode, groups) for mode in MODES}, rounds)
        policies = {}
        for event in events:
            policies[event.version] = AutoModelForCausalLM.from_pretrained(model, dtype="float32").eval()
            policies[event.version].load_state_dict(weights.decode(event, weights.fetch(event)), strict=False)
        for made in itertools.chain(*sides.values()):
            made |= divergences(made.pop("rollouts"), policies, scored)
    speed = {mode: [m["tokens"] / m["seconds"] for m in made] for mode, made in sides.items()}
    value = ratio("tokens/s: reuse_partial ÷ recompute", speed["reuse_partial"], speed["recompute"])
    measures: list[Measure] = [ratio("tokens/s: reuse ÷ recompute", speed["reuse"], speed["recompute"])]
    for mode, made in sides.items():
        measures += [mean(f"{mode}: sampled", speed[mode], "tokens/s"), mean(f"{mode}: pause of an update", [m["pause_ms"] for m in made], "ms"),
                     mean(f"{mode}: prompt tokens found in the prefix cache", [m["hits"] for m in made], "share"),
                     mean(f"{mode}: KL that the stale cache adds", [m["stale cache"] for m in made], "nats"),
                     mean(f"{mode}: KL of the mixture to the newest version", [m["mixture"] for m in made], "nats")]
    report("kv_modes", value, measures, sides=sides,
           settings={"quick": quick, "lr": LEARNING_RATE, "every_steps": EVERY, "versions": VERSIONS, "groups": groups, "scored": scored,
                     "generation": GENERATION.model_dump(mode="json")},
           seeds={"prompts": 0, "engine": 0}, on=on)
