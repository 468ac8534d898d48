"""Micro-batches and manifests for tests: random rows, reproducible by seed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from schemas.record import encode_batch
from schemas.records import Manifest, Sequence, now
from schemas.settings import Settings


def sequence(step: int, index: int, random: np.random.Generator, *, micro_batch: int = 0, longest: int = 40, vocab: int = 320,
             **changes) -> Sequence:
    length, prompt = int(random.integers(6, longest)), int(random.integers(1, 5))
    sampled = length - prompt
    return Sequence(**{
        "step": step, "micro_batch": micro_batch, "group_id": f"d/0/{index // 4}", "sample_index": index % 4, "rollout_id": f"r{index}",
        "token_ids": random.integers(3, vocab, length).tolist(), "prompt_length": prompt,
        "loss_mask": [False] * prompt + [True] * sampled,
        "rollout_logprobs": [None] * prompt + (-3 * random.random(sampled) - 3).tolist(),
        "ref_logprobs": [None] * prompt + (-3 * random.random(sampled) - 3).tolist(),
        "version_spans": [{"start": prompt, "policy_version": max(0, step - 2)}, {"start": prompt + 1, "policy_version": step - 1}],
        "advantage": float(random.normal()), "reward": 1.0, "temperature": 1.0, "truncated": False,
    } | changes)


def table(rows: list[Sequence]) -> pa.Table:
    names = Sequence.arrow_schema.names
    return pa.Table.from_pylist([{n: getattr(r, n) for n in names} for r in rows], schema=Sequence.arrow_schema)


def step(number: int, micro_batches: int, *, rows: int = 10, seed: int | None = None,
         change: Callable[[int], dict] = lambda i: {}) -> tuple[Manifest, list[pa.Table]]:
    """A step whose rows are the same however many micro-batches they are dealt to."""
    random = np.random.default_rng(number if seed is None else seed)
    made = [sequence(number, i, random, micro_batch=i % micro_batches, **change(i)) for i in range(rows)]
    return manifest(number, made), [table([r for r in made if r.micro_batch == i]) for i in range(micro_batches)]


def manifest(number: int, rows: list[Sequence]) -> Manifest:
    return Manifest(
        run_id="run", kind="step", step=number, micro_batch_offsets=sorted({r.micro_batch for r in rows}), sequences=len(rows),
        groups=len({r.group_id for r in rows}), trainable_tokens=sum(sum(r.loss_mask) for r in rows),
        tokens=sum(len(r.token_ids) for r in rows), lag_max=1, metrics=[("reward/mean", 0.5)], formed_at=now(),
        samples=[{"group_id": r.group_id, "sample_index": r.sample_index, "rollout_id": r.rollout_id} for r in rows])


def end(number: int) -> Manifest:
    return Manifest(run_id="run", kind="end", step=number, micro_batch_offsets=[], sequences=0, groups=0, trainable_tokens=0, tokens=0,
                    samples=[], lag_max=0, metrics=[], formed_at=now())


def messages(tables: list[pa.Table]) -> list[bytes]:
    return [encode_batch(t) for t in tables]


def settings(model: Path | str, folder: Path, *, dtype: str = "float32", **training) -> Settings:
    return Settings(
        run={"id": "run", "dir": folder}, model={"path": str(model)}, generation={"dtype": dtype},
        training={"dtype": dtype, "lr": 1e-3, "device": "cpu", "rendezvous_timeout_s": 60, "stall_timeout_s": 120, **training})
