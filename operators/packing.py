"""Packing: sequences to micro-batches by token budget, and the table a micro-batch is in the log."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import pyarrow as pa
import pyarrow.compute as pc

from operators.grouping import Row
from schemas.records import Sequence


def pack(lengths: Seq[int], budget: int) -> list[list[int]]:
    """Indices of sequences a micro-batch, by first-fit decreasing; a sequence longer than the budget gets one of its own.

    Micro-batches are in the order of their first sequence.

    >>> pack([5, 4, 3, 6], 9)
    [[0, 1], [2, 3]]
    """
    bins: list[tuple[int, list[int]]] = []
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for b, (used, members) in enumerate(bins):
            if used + lengths[i] <= budget:
                bins[b] = (used + lengths[i], [*members, i])
                break
        else:
            bins.append((lengths[i], [i]))
    return sorted(sorted(members) for _, members in bins)


def consecutive(lengths: Seq[int], budget: int) -> Iterator[slice]:
    """Sequences in their order, as many at a time as the budget holds and at least one.

    >>> list(consecutive([5, 4, 3, 12], 9))
    [slice(0, 2, None), slice(2, 3, None), slice(3, 4, None)]
    """
    start = used = 0
    for i, length in enumerate(lengths):
        if i > start and used + length > budget:
            yield slice(start, i)
            start, used = i, 0
        used += length
    if len(lengths):
        yield slice(start, len(lengths))


_COPIED = ("group_id", "sample_index", "rollout_id", "token_ids", "prompt_length", "rollout_logprobs", "ref_logprobs", "version_spans",
           "reward", "truncated")
_READ = [*_COPIED, "loss_mask", "sampling"]


def micro_batch(step: int, index: int, rows: list[tuple[Row, float]]) -> pa.Table:
    """Table of the sequence schema. Tokens without a behaviour log-probability are masked out: null stays null."""
    table = pa.concat_tables([r.table.select(_READ) for r, _ in rows]).combine_chunks()
    mask, logprobs = table.column("loss_mask").combine_chunks(), table.column("rollout_logprobs").combine_chunks()
    trainable = pa.ListArray.from_arrays(mask.offsets, pc.and_(mask.values, pc.is_valid(logprobs.values)))
    columns = {n: table.column(n) for n in _COPIED} | {
        "step": pa.array([step] * len(rows), pa.int64()), "micro_batch": pa.array([index] * len(rows), pa.int32()),
        "loss_mask": trainable, "advantage": pa.array([a for _, a in rows], pa.float32()),
        "temperature": pc.struct_field(table.column("sampling"), "temperature"),
    }
    schema: pa.Schema = Sequence.arrow_schema
    return pa.Table.from_arrays([columns[n] for n in schema.names], schema=schema)
