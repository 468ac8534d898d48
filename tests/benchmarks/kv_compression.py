"""kv_compression: what lz4 and zstd would save of a KV cache, measured on that of a real model before anybody builds on it.

SmolLM2-135M in bfloat16 answers chat prompts; its KV cache is cut into vLLM's blocks (16 tokens of one layer, keys or values), and each is
compressed by itself: as it lies, with bytes by significance (all high bytes, then all low ones), and that of the difference to the token
before. A setting for it is worth having from 10 % on.
"""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from tests.benchmarks.common import machine, mean, report, sampled

GOAL = 0.10
BLOCK = 16  # tokens
CODECS = ("lz4", "zstd")


def cache(model: Path, prompts: int, tokens: int, seed: int) -> list[np.ndarray]:
    """Blocks (BLOCK, heads, dim) of uint16, of sampled answers of `tokens` tokens."""
    import torch

    questions = (f"Explain step by step how to add {17 * i % 900 + 100} and {29 * i % 900 + 100}." for i in range(prompts))
    blocks = []
    for _, made in sampled(model, questions, tokens, seed=seed):
        for layer in made.past_key_values.layers:
            for kind in (layer.keys, layer.values):
                x = kind[0].transpose(0, 1).contiguous().view(torch.int16).numpy().view(np.uint16)  # tokens, heads, dim
                blocks += [x[at:at + BLOCK] for at in range(0, len(x) - BLOCK + 1, BLOCK)]
    return blocks


def as_it_lies(block: np.ndarray) -> bytes:
    return block.tobytes()


def by_significance(block: np.ndarray) -> bytes:
    return np.ascontiguousarray(block.reshape(-1).view(np.uint8).reshape(-1, 2).T[::-1]).tobytes()


def differences(block: np.ndarray) -> bytes:
    return by_significance(np.concatenate([block[:1], block[1:] - block[:-1]]))


def run(*, quick: bool = False) -> None:
    from deploy.models import make_in_process

    on = machine()
    prompts, tokens = (1, 64) if quick else (8, 256)
    blocks = cache(Path(make_in_process("smollm2")), prompts, tokens, 0)
    print(f"{len(blocks)} blocks of {blocks[0].nbytes:,} bytes", flush=True)
    measures, sides = [], {}
    for form in (as_it_lies, by_significance, differences):
        raw = [form(b) for b in blocks]
        for codec in CODECS:
            began = time.perf_counter()
            sizes = [len(pa.compress(r, codec=codec, asbytes=True)) for r in raw]
            seconds = time.perf_counter() - began
            name = f"{codec}, {form.__name__.replace('_', ' ')}"
            sides[name] = {"saved": [1 - s / len(r) for s, r in zip(sizes, raw, strict=True)], "mb_per_s": sum(map(len, raw)) / 1e6 / seconds}
            measures.append(mean(f"{name}: share of the bytes saved", sides[name]["saved"], "ratio", GOAL))
            measures.append(mean(f"{name}: compressing", [sides[name]["mb_per_s"]], "MB/s"))
    best = max((m for m in measures if m.unit == "ratio"), key=lambda m: m.value)
    for side in sides.values():
        side["saved"] = float(np.mean(side["saved"]))
    report("kv_compression", best, [m for m in measures if m is not best], sides=sides,
           settings={"quick": quick, "prompts": prompts, "tokens": tokens, "block": BLOCK}, seeds={"sampling": 0}, on=on)
