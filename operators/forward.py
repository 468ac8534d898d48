"""The one forward pass of trainer and reference: many sequences packed into one row, log-probabilities of chosen tokens.

Promises: a token's log-probability does not depend on what it is packed with; it is taken in float32, at its row's temperature,
and both sides use this code. Sequences are told apart by position ids that restart, and by `packing`; there is never an attention
mask, because a mask beside restarting positions silently lets sequences see each other. `load_model` refuses a model for which
the promise does not hold.

T: tokens of the packed row. S: sequences. K: chosen tokens ("targets"), each with a predecessor in its sequence. V: vocabulary.
"""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from operators.packed_attention import NAME as PACKED_SDPA
from operators.packed_attention import Packing, layout
from schemas.settings import ModelSettings

CHUNK_ELEMENTS = 1 << 22  # of float32 logits that exist at once


class BadModel(ValueError):
    """A model folder that cannot be used; the text names it and what it lacks."""


@dataclasses.dataclass(slots=True)
class Packed:
    """A micro-batch on its device. Entry k of a [K] tensor speaks of token `targets[k]`, never of its neighbour."""

    token_ids: torch.Tensor  # [1, T] int64
    position_ids: torch.Tensor  # [1, T] int64, restarting at 0 with each sequence
    targets: torch.Tensor  # [K] int64, positions in the row, ascending
    sequence: torch.Tensor  # [K] int64, which sequence a target belongs to, ascending
    temperature: torch.Tensor  # [K] float32
    lengths: np.ndarray  # [S] int64, tokens of each sequence
    packing: Packing  # how attention lays the sequences out

    @property
    def sequences(self) -> int:
        """S."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """T."""
        return self.token_ids.shape[1]


def lists(column: pa.ChunkedArray | pa.ListArray) -> tuple[np.ndarray, np.ndarray]:
    """A list column as (its values in one array [T], offsets [S + 1]). Null values become NaN; a null list is an empty one."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    values = array.flatten()  # what the lists really hold: slices and null lists are honoured
    lengths = array.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    return values.to_numpy(zero_copy_only=False), np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])


def with_predecessor(wanted: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Positions of the wanted tokens [T] that a forward pass can speak of: all but the first of each sequence."""
    wanted = wanted.astype(bool, copy=True)
    starts = offsets[:-1]
    wanted[starts[starts < offsets[1:]]] = False  # an empty sequence has no first token
    return np.flatnonzero(wanted)


def pack(token_ids: np.ndarray, offsets: np.ndarray, targets: np.ndarray, temperature: np.ndarray,
         device: torch.device | str = "cpu") -> Packed:
    """One row of the sequences `token_ids[offsets[s]:offsets[s + 1]]`.

    targets: positions in `token_ids`, as from `with_predecessor`. temperature: [S], greater than 0. Raises ValueError otherwise.
    """
    if not (np.isfinite(temperature) & (temperature > 0)).all():
        raise ValueError(f"temperatures must be greater than 0, not {temperature.tolist()}")
    lengths = np.diff(offsets)
    positions = np.arange(len(token_ids), dtype=np.int64) - np.repeat(offsets[:-1], lengths)
    sequence = np.searchsorted(offsets, targets, side="right") - 1

    def put(a: np.ndarray, dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.array(a, dtype=dtype)).to(device)  # a copy: Arrow's memory is read-only

    return Packed(
        token_ids=put(token_ids, np.int64)[None], position_ids=put(positions, np.int64)[None], targets=put(targets, np.int64),
        sequence=put(sequence, np.int64), temperature=put(temperature[sequence], np.float32), lengths=lengths,
        packing=layout(lengths, device),
    )


def token_logprobs(model: Any, packed: Packed, *, entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Log-probability [K] of each target under the model, and with `entropy` that of the distribution it was taken from [K].

    `model` is a causal language model of transformers or a DeepSpeed engine around one. Only the positions before a target go
    through the output layer, where the model allows that.
    """
    before = packed.targets - 1
    kwargs = {"input_ids": packed.token_ids, "position_ids": packed.position_ids, "attention_mask": None, "use_cache": False}
    module = getattr(model, "module", model)  # of a DeepSpeed engine
    if module.config._attn_implementation == PACKED_SDPA:
        kwargs["packing"] = packed.packing
    logits = model(**kwargs, logits_to_keep=before).logits[0] if _selects_logits(module) else model(**kwargs).logits[0, before]
    return chosen_logprobs(logits, packed.token_ids[0, packed.targets], packed.temperature, entropy=entropy)


def chosen_logprobs(logits: torch.Tensor, ids: torch.Tensor, temperature: torch.Tensor, *,
                    entropy: bool = False) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`log softmax(logits / temperature)[k, ids[k]]` in float32 for logits [K, V], and the entropy of each row.

    The float32 logits never exist as a whole, neither here nor in the backward pass.
    """
    logprobs, entropies = _Chosen.apply(logits, ids, temperature, entropy)
    return logprobs, entropies if entropy else None


def spread(packed: Packed, values: torch.Tensor) -> torch.Tensor:
    """[K] values at their tokens [T]; NaN where there is none."""
    out = torch.full((packed.tokens,), float("nan"), dtype=values.dtype, device=values.device)
    return out.index_copy(0, packed.targets, values)


class Float32Head(torch.nn.Linear):
    """An output layer whose product is taken in float32, whatever the dtype of its weights: logits that are rounded to bfloat16 are a part
    of what trainer and engine disagree on (MiniMax-M1, arXiv:2506.13585, section 3.2; how much of it, `make bench BENCH=precision`)."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        bias = None if self.bias is None else self.bias.float()
        return torch.nn.functional.linear(hidden.float(), self.weight.float(), bias)


class _Chosen(torch.autograd.Function):
    """Saves the logits as the model made them and one number a row; recomputes the rest chunk by chunk."""

    @staticmethod
    def forward(ctx, logits, ids, temperature, want_entropy):
        rows, vocabulary = logits.shape
        logprobs, lse = (torch.empty(rows, dtype=_wide(logits), device=logits.device) for _ in range(2))
        entropies = torch.empty_like(lse) if want_entropy else lse.new_zeros(0)
        for part in _chunks(rows, vocabulary):
            x = _scaled(logits, temperature, part)
            lse[part] = torch.logsumexp(x, -1)
            logprobs[part] = x.gather(-1, ids[part, None])[:, 0] - lse[part]
            if want_entropy:
                x -= lse[part, None]
                entropies[part] = -(x.exp() * x).sum(-1)
        ctx.save_for_backward(logits, ids, temperature, lse, entropies)
        ctx.set_materialize_grads(False)
        return logprobs, entropies

    @staticmethod
    def backward(ctx, d_logprobs, d_entropies):
        logits, ids, temperature, lse, entropies = ctx.saved_tensors
        if not entropies.numel():
            d_entropies = None
        if d_logprobs is None and d_entropies is None:
            return None, None, None, None
        out = torch.empty_like(logits)
        for part in _chunks(*logits.shape):
            x = _scaled(logits, temperature, part).sub_(lse[part, None])  # log p
            p = x.exp()
            slope = None
            if d_entropies is not None:  # dH/dx_j = -p_j (log p_j + H)
                slope = x.add_(entropies[part, None]).mul_(p).mul_(-d_entropies[part, None])
            if d_logprobs is not None:
                p.mul_(-d_logprobs[part, None]).scatter_add_(-1, ids[part, None], d_logprobs[part, None])
                slope = p if slope is None else slope.add_(p)
            out[part] = slope.div_(temperature[part, None])
        return out, None, None, None


def load_model(settings: ModelSettings, *, dtype: str, attention: str) -> torch.nn.Module:
    """The causal language model in a Hugging Face folder. Raises BadModel if the folder is none."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    path, folder = settings.path, Path(settings.path)
    if not (folder / "config.json").is_file():
        raise BadModel(f"{path!r} is no model folder: it has no config.json (it needs config.json, tokenizer files and safetensors)")
    implementation = PACKED_SDPA if attention == "sdpa" else attention
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation=implementation, trust_remote_code=settings.trust_remote_code,
            local_files_only=True)
    except (OSError, ValueError, ImportError) as e:
        raise BadModel(f"{path} cannot be loaded with attention {attention!r}: {e}") from e
    model.config.use_cache = False
    if settings.head_dtype == "float32":
        head = model.get_output_embeddings()
        if type(head) is not torch.nn.Linear:
            raise BadModel(f"{path}: the output layer of {type(model).__name__} is {type(head).__name__}, no linear layer: "
                           "set model.head_dtype = model")
        head.__class__ = Float32Head  # its parameters stay what and where they are, under their names
    return model


@torch.no_grad()
def check_packing(model: Any, tolerance: float) -> None:
    """Raise BadModel unless two sequences have the same log-probabilities packed and apart: the model may ignore restarting positions."""
    module = getattr(model, "module", model)
    device, training = next(module.parameters()).device, module.training
    ids = np.arange(20) % module.config.get_text_config().vocab_size

    def logprobs(lengths: list[int]) -> torch.Tensor:
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        at = offsets[-2] if len(lengths) > 1 else 0
        packed = pack(ids[-offsets[-1]:], offsets, np.arange(at + 1, offsets[-1]), np.ones(len(lengths)), device)
        return token_logprobs(model, packed)[0]

    module.eval()
    try:
        apart = (logprobs([8, 12]) - logprobs([12])).abs().max().item()
    finally:
        module.train(training)
    if not apart <= tolerance:
        raise BadModel(f"{module.config.name_or_path}: log-probabilities of a sequence differ by {apart:.3g} when another one is packed "
                       f"before it; {type(module).__name__} cannot be trained on packed sequences")


def _scaled(logits: torch.Tensor, temperature: torch.Tensor, part: slice) -> torch.Tensor:
    return logits[part].to(_wide(logits)) / temperature[part, None]


def _wide(logits: torch.Tensor) -> torch.dtype:
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


def _chunks(rows: int, vocabulary: int) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // vocabulary)
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]


def _selects_logits(module: torch.nn.Module) -> bool:
    known = getattr(module, "_pipelinerl_selects_logits", None)
    if known is None:
        known = module._pipelinerl_selects_logits = "logits_to_keep" in inspect.signature(module.forward).parameters
    return known
