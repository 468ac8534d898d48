"""Causal attention of a packed row, sequence by sequence instead of over the whole row.

A packed row of T tokens under torch's attention needs a T x T mask and does T x T work, nearly all of it between sequences that do
not see each other. Here the rest of the model runs on the packed row, and for attention alone the sequences are laid side by side,
padded at their ends: the causal rule then hides the padding by itself and no mask exists. Sequences of similar length share a block,
so that padding stays below the size of the row. It is an attention implementation of transformers named `packed_sdpa`, and takes its
layout from the keyword argument `packing` of the model's forward.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

NAME = "packed_sdpa"
FEW_TOKENS = 512  # padding that costs less than one more call


@dataclasses.dataclass(slots=True)
class Block:
    """Sequences side by side: `sequences` rows of `length` places."""

    tokens: torch.Tensor | None  # positions in the packed row; None: the whole row in its order
    places: torch.Tensor  # where they go, in rows * length places
    sequences: int
    length: int


@dataclasses.dataclass(slots=True)
class Packing:
    """The blocks of a packed row, and how their outputs, one after the other, come back into its order."""

    blocks: list[Block]
    back: torch.Tensor | None


def layout(lengths: np.ndarray, device: torch.device | str = "cpu") -> Packing:
    """Blocks for sequences of these lengths, in the order they lie in the row."""
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    groups: list[list[int]] = []
    waste = 0
    for s in np.argsort(-lengths, kind="stable"):
        if not lengths[s]:
            continue
        longest = lengths[groups[-1][0]] if groups else 0
        pad = longest - lengths[s]
        if groups and (2 * lengths[s] >= longest or waste + pad <= FEW_TOKENS):
            groups[-1].append(s)
            waste += pad
        else:
            groups.append([s])
            waste = 0
    if len(groups) == 1:
        groups[0].sort()
    blocks, order = [], []
    for group in groups:
        n, start = lengths[group], starts[group]
        length = int(n.max())
        inside = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
        tokens = np.repeat(start, n) + inside
        places = np.repeat(np.arange(len(group)) * length, n) + inside
        order.append(tokens)
        blocks.append(Block(torch.from_numpy(tokens).to(device) if len(groups) > 1 else None, torch.from_numpy(places).to(device),
                            len(group), length))
    back = torch.from_numpy(np.argsort(np.concatenate(order))).to(device) if len(groups) > 1 else None
    return Packing(blocks, back)


def packed_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                     attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
                     packing: Packing | None = None, sliding_window: int | None = None, **other: Any) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, D], key and value [1, kv heads, T, D] -> ([1, T, heads, D], None)."""
    if packing is None or attention_mask is not None:
        raise ValueError(f"{type(module).__name__}: {NAME} wants a `packing` and no attention mask; the model does not pass its keyword "
                         "arguments on to attention, or makes masks of its own")
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if other.get(name) is not None]
    if unknown:
        raise ValueError(f"{type(module).__name__}: {NAME} does not know {', '.join(unknown)}")
    groups = getattr(module, "num_key_value_groups", 1)
    rows = [x[0].transpose(0, 1) for x in (query, key, value)]  # [T, heads, D]
    outputs = []
    for block in packing.blocks:
        size = block.sequences * block.length
        q, k, v = (
            x.new_zeros(size, *x.shape[1:]).index_copy(0, block.places, x if block.tokens is None else x.index_select(0, block.tokens))
            .view(block.sequences, block.length, *x.shape[1:]).transpose(1, 2) for x in rows)
        mask = None
        if sliding_window is not None and sliding_window < block.length:
            at = torch.arange(block.length, device=query.device)
            mask = (at[:, None] >= at) & (at[:, None] - at < sliding_window)
        out = scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling, is_causal=mask is None,
                                           enable_gqa=groups > 1)
        outputs.append(out.transpose(1, 2).reshape(size, *out.shape[1::2]).index_select(0, block.places))
    packed = outputs[0] if packing.back is None else torch.cat(outputs).index_select(0, packing.back)
    return packed[None], None


AttentionInterface.register(NAME, packed_attention)
