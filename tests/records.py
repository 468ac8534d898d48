"""Records for tests: complete ones, of which a test changes what it is about."""

from __future__ import annotations

import pyarrow as pa

from schemas.record import encode, read
from schemas.records import Admission, Outcome, Prompt, Rollout, now


def prompt(ordinal: int = 0, **changes) -> Prompt:
    return Prompt(**{"dataset": "d", "dataset_pass": 0, "prompt_ordinal": ordinal, "prompt_id": str(ordinal), "prompt": "1+1=",
                     "task": "exact_match", "answer": "2"} | changes)


def admission(index: int, samples: int = 4, **changes) -> Admission:
    return Admission(**{"run_id": "r", "kind": "group", "admission": index, "group_id": f"d/0/{index}", "samples": samples,
                        "prompt_offset": index, "policy_version": 0, "min_version": 0, "credit": 0, "admitted_at": now()} | changes)


def rollout(group: int = 0, sample: int = 0, *, size: int = 4, version: int = 0, reward: float | None = 0.0, prompt_length: int = 3,
            response: int = 5, **changes) -> Rollout:
    n = prompt_length + response
    return Rollout(**{
        "run_id": "r", "group_id": f"d/0/{group}", "sample_index": sample, "rollout_id": f"{group}.{sample}.0", "attempt": 0,
        "admission": group, "group_size": size, "prompt_id": str(group), "prompt_ordinal": group, "dataset": "d", "dataset_pass": 0,
        "task": "exact_match", "token_ids": list(range(n)), "prompt_length": prompt_length,
        "loss_mask": [i >= prompt_length for i in range(n)],
        "rollout_logprobs": [None if i < prompt_length else -1.0 for i in range(n)],
        "version_spans": [{"start": prompt_length, "policy_version": version}],
        "policy_version_min": version, "policy_version_max": version, "policy_version_admitted": version,
        "finish_reason": "stop", "truncated": False, "eos_sampled": True,
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": None, "max_tokens": 64},
        "kv_policy": "reuse_partial", "engine": "fake", "generator_id": "g0", "weights_digest": "w", "tokenizer_digest": "t",
        "completion": "x", "reward": reward, "reward_status": "ok", "turns": [], "dispatched_at": now(), "finished_at": now(),
    } | changes)


def table(row: Rollout) -> pa.Table:
    return read(Rollout, encode([row]))


def outcome(group: int, sample: int, what: str, **changes) -> Outcome:
    return Outcome(**{"run_id": "r", "group_id": f"d/0/{group}", "sample_index": sample, "rollout_id": f"{group}.{sample}.0",
                      "outcome": what, "decided_at": now()} | changes)
