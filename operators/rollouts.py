"""From a dispatch to a request, from what an engine sampled to a `Rollout` record.

Promises: token ids are the engine's own, never re-tokenised; per-token lists have the length of `token_ids`; what was not sampled has no
logprob and no mask; the finish reason is the engine's. A prompt that cannot be served becomes a rollout that says why. It knows
tokenizers and records, neither an engine nor Kafka.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from operators.evaluation import is_evaluation
from schemas.record import BadRecord, decode
from schemas.records import FINISH_REASONS, Dispatch, Prompt, Rollout, now
from schemas.settings import GenerationSettings

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
                   "vocab.json", "vocab.txt", "merges.txt", "chat_template.jinja", "chat_template.json")


@dataclass(slots=True)
class Sampled:
    """What an engine made of a request.

    `token_ids` are the response's; the first len(logprobs) of them were sampled, what follows was appended. `spans` are
    (start, version label), start counting from the response's first token.
    """

    ident: str
    token_ids: list[int]
    logprobs: list[float]
    spans: list[tuple[int, str]]
    finish_reason: str


@dataclass(slots=True)
class Request:
    """A sample that waits for a slot or holds one. `refusal` is (finish reason, cause) of one that cannot be served."""

    ident: str
    attempt: int
    dispatch: Dispatch
    prompt: Prompt | None
    prompt_ids: list[int]
    max_tokens: int
    refusal: tuple[str, str] | None = None


def label(epoch: int, version: int) -> str:
    """The name under which an engine knows a version: two epochs of one version are different weights."""
    return f"{epoch}.{version}"


def version_of(label: str) -> int:
    return int(label.split(".")[1])


def tokenizer_digest(folder: str | Path) -> str:
    """sha256 over the tokenizer's files: names, sizes and bytes."""
    digest = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = Path(folder) / name
        if path.is_file():
            data = path.read_bytes()
            digest.update(f"{name}:{len(data)}:".encode() + data)
    return digest.hexdigest()


class Rollouts:
    """Makes requests and records for one generator. `tokenizer` is a Hugging Face one; `stop_ids` are the ids that end a sequence."""

    def __init__(self, settings: GenerationSettings, *, run_id: str, generator_id: str, engine: str, tokenizer: Any,
                 tokenizer_digest: str, stop_ids: frozenset[int]):
        if settings.chat_template and not getattr(tokenizer, "chat_template", None):
            raise ValueError("generation.chat_template is set, but the model's tokenizer has no chat template: add one or unset it")
        self._settings, self._tokenizer, self._stop_ids = settings, tokenizer, stop_ids
        self._last: tuple[bytes, Prompt, list[int]] | None = None  # a group's samples come one after the other, with the same prompt
        self._common = {"run_id": run_id, "generator_id": generator_id, "engine": engine, "kv_policy": settings.kv_cache_mode,
                        "tokenizer_digest": tokenizer_digest, "reward": None, "reward_components": None, "reward_status": "pending"}

    def request(self, ident: str, attempt: int, message: bytes) -> Request:
        """Raises BadRecord if the message is no Dispatch; a bad prompt inside it is refused, not raised."""
        (dispatch,) = decode(Dispatch, message)
        request = Request(ident, dispatch.attempt + attempt, dispatch, None, [], self._settings.max_tokens)
        if self._last is None or self._last[0] != dispatch.prompt:
            self._read(request)
            if request.refusal is None:
                self._last = dispatch.prompt, request.prompt, request.prompt_ids
        else:
            _, request.prompt, request.prompt_ids = self._last
        request.max_tokens = min(self._settings.max_tokens, self._settings.max_model_len - len(request.prompt_ids))
        return request

    def _read(self, request: Request) -> None:
        """Fill in prompt and prompt_ids, or the refusal."""
        dispatch = request.dispatch
        try:
            (request.prompt,) = decode(Prompt, dispatch.prompt)
        except (BadRecord, ValueError) as e:
            request.refusal = "error", f"the prompt of group {dispatch.group_id} cannot be read: {e}"
            return
        try:
            request.prompt_ids = self._render(request.prompt.prompt)
        except (TemplateError, ValueError, TypeError) as e:
            request.refusal = "error", f"prompt {request.prompt.prompt_id!r} cannot be rendered: {e}"
            return
        limit, length = self._settings.max_model_len, len(request.prompt_ids)
        if not length:
            request.refusal = "error", f"prompt {request.prompt.prompt_id!r} renders to no token at all"
        elif length >= limit:
            request.refusal = "context_overflow", (f"prompt {request.prompt.prompt_id!r} has {length} tokens, which leaves no room for "
                                                   f"a response: generation.max_model_len is {limit}")

    def _render(self, text: str) -> list[int]:
        if self._settings.chat_template:
            turn = [{"role": "user", "content": text}]
            return list(self._tokenizer.apply_chat_template(turn, add_generation_prompt=True, tokenize=True, return_dict=False))
        return list(self._tokenizer(text)["input_ids"])

    def refused(self, request: Request, digest: str) -> Rollout:
        """The rollout of a request that no engine was asked to serve; `digest` is of the weights it would have met."""
        reason, cause = request.refusal
        return self.finished(request, Sampled(request.ident, [], [], [], reason), None, {}, digest, cause)

    def finished(self, request: Request, sampled: Sampled, first_token_at: datetime | None, digests: Mapping[str, str],
                 held_digest: str, cause: str | None = None) -> Rollout:
        """The rollout of a sequence that ended. `digests`: version label -> digest of the weights; `held_digest` if nothing was sampled."""
        reason = sampled.finish_reason
        if reason not in FINISH_REASONS:
            reason, cause = "error", f"the engine ended the sequence with {reason!r}"
        start, tokens, count = len(request.prompt_ids), len(sampled.token_ids), len(sampled.logprobs)
        spans: list[dict] = []
        for at, name in sampled.spans:
            version = version_of(name)
            if not spans or spans[-1]["policy_version"] != version:
                spans.append({"start": start + at, "policy_version": version})
        versions = [span["policy_version"] for span in spans]
        dispatch = request.dispatch
        train = not is_evaluation(dispatch.group_id)
        text = self._tokenizer.decode(sampled.token_ids, skip_special_tokens=True) if tokens else ""
        turns = [{"role": "user", "start": 0, "end": start}] if start else []
        if tokens:
            turns.append({"role": "assistant", "start": start, "end": start + tokens})
        return Rollout(
            **self._common, **_prompt_fields(dispatch.group_id, request.prompt),
            group_id=dispatch.group_id, sample_index=dispatch.sample_index, rollout_id=uuid.uuid4().hex, attempt=request.attempt,
            admission=dispatch.admission, group_size=dispatch.group_size,
            token_ids=request.prompt_ids + sampled.token_ids, prompt_length=start,
            loss_mask=[False] * start + [train] * count + [False] * (tokens - count),
            rollout_logprobs=[None] * start + (sampled.logprobs if train else [None] * count) + [None] * (tokens - count),
            version_spans=spans, policy_version_min=min(versions, default=None), policy_version_max=max(versions, default=None),
            policy_version_admitted=dispatch.policy_version,
            finish_reason=reason, finish_cause=cause, truncated=reason == "length",
            eos_sampled=bool(count) and count == tokens and sampled.token_ids[-1] in self._stop_ids,
            sampling={"temperature": 0.0 if dispatch.greedy else self._settings.temperature, "top_p": 1.0, "top_k": -1, "seed": None,
                      "max_tokens": request.max_tokens},
            weights_digest=digests[sampled.spans[-1][1]] if sampled.spans else held_digest,
            completion=text, turns=turns, dispatched_at=dispatch.dispatched_at, first_token_at=first_token_at, finished_at=now(),
        )


def _prompt_fields(group_id: str, prompt: Prompt | None) -> dict[str, Any]:
    if prompt is not None:
        names = ("prompt_id", "prompt_ordinal", "dataset", "dataset_pass", "task", "answer", "task_metadata")
        return {n: getattr(prompt, n) for n in names}
    # What cannot be read still has an identity: group_id is dataset/pass/ordinal.
    dataset, dataset_pass, ordinal = group_id.rsplit("/", 2)
    return {"prompt_id": group_id, "prompt_ordinal": int(ordinal), "dataset": dataset, "dataset_pass": int(dataset_pass), "task": "",
            "answer": None, "task_metadata": None}
