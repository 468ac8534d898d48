"""From rows of `batches` to tensors: what the trainer needs of a micro-batch, straight from the Arrow columns."""

from __future__ import annotations

import dataclasses

import numpy as np
import pyarrow as pa
import torch

from operators.forward import Packed, lists, pack, with_predecessor

LAGS = 256  # a lag histogram's bins; the last one holds all that is older
#: Counts of a micro-batch, in the order of `counts`; the lag histogram of its trainable tokens follows.
COUNTS = ("sequences", "spans", "response_tokens", "packed_tokens")


@dataclasses.dataclass(slots=True)
class MicroBatch:
    """K trainable tokens of S sequences in a packed row of T tokens."""

    packed: Packed
    behaviour: torch.Tensor  # [K] float32, log-probability under the policy that sampled it
    advantage: torch.Tensor  # [K] float32
    reference: torch.Tensor | None  # [K] float32, NaN where there is none; None if there is none at all
    on_policy: torch.Tensor  # [K] bool, of a sequence that the version that trains sampled as a whole
    position: torch.Tensor  # [K] int64, in the response, from 0
    lag: torch.Tensor  # [K] int64, steps between the version that sampled it and the one that trains
    counts: np.ndarray  # [len(COUNTS) + LAGS] float64
    rows: list[str]  # [S] group_id#sample_index, to name a row in an error


def read(table: pa.Table, device: torch.device | str = "cpu") -> MicroBatch:
    """Trainable are the tokens whose loss_mask is true and that have a predecessor. Raises ValueError naming the row."""
    token_ids, offsets = lists(table.column("token_ids"))
    rows = [f"{g}#{s}" for g, s in zip(table.column("group_id").to_pylist(), table.column("sample_index").to_pylist(), strict=True)]
    step = table.column("step")[0].as_py()

    def per_token(name: str) -> np.ndarray:
        values, found = lists(table.column(name))
        if not np.array_equal(found, offsets):
            row = rows[int(np.flatnonzero(np.diff(found) != np.diff(offsets))[0])]
            raise ValueError(f"step {step}, row {row}: {name} is not as long as token_ids")
        return values

    targets = with_predecessor(per_token("loss_mask"), offsets)
    sequence = np.searchsorted(offsets, targets, side="right") - 1
    behaviour = per_token("rollout_logprobs")[targets]
    if not np.isfinite(behaviour).all():
        row = rows[sequence[~np.isfinite(behaviour)][0]]
        raise ValueError(f"step {step}, row {row}: a trainable token has no finite rollout_logprob; the sequencer must refuse such a row")
    reference = None
    column = table.column("ref_logprobs")
    if column.null_count < len(column):
        reference = np.full(len(targets), np.nan, np.float32)
        have = np.diff(lists(column)[1]) > 0
        values, found = lists(column)
        if not np.array_equal(np.diff(found)[have], np.diff(offsets)[have]):
            raise ValueError(f"step {step}: ref_logprobs of a row among {rows} are not as long as token_ids")
        inside = have[sequence]
        reference[inside] = values[(targets - offsets[sequence] + found[sequence])[inside]]
    lag = step - 1 - _versions(table, offsets, targets, sequence, rows, step)
    lengths, prompts = np.diff(offsets), table.column("prompt_length").to_numpy()
    # A token of this version that stands on an older version's KV cache is of another distribution: that is no mismatch of engines.
    oldest = np.zeros(len(rows), np.int64)
    np.maximum.at(oldest, sequence, lag)
    counts = np.concatenate([
        [len(rows), len(table.column("version_spans").combine_chunks().flatten()),
         lengths.sum() - prompts.sum(), lengths.sum()],
        np.bincount(lag.clip(0, LAGS - 1), minlength=LAGS)]).astype(np.float64)

    def put(a: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.array(a)).to(device)

    return MicroBatch(
        packed=pack(token_ids, offsets, targets, table.column("temperature").to_numpy(), device), behaviour=put(behaviour),
        advantage=put(table.column("advantage").to_numpy()[sequence]), reference=None if reference is None else put(reference),
        on_policy=put(oldest[sequence] == 0), position=put(targets - offsets[sequence] - prompts[sequence]), lag=put(lag),
        counts=counts, rows=rows)


def _versions(table: pa.Table, offsets: np.ndarray, targets: np.ndarray, sequence: np.ndarray, rows: list[str], step: int) -> np.ndarray:
    """[K] the version that computed each target: that of the last span which starts at or before it."""
    column = table.column("version_spans").combine_chunks()
    spans = column.flatten()
    starts = spans.field("start").to_numpy(zero_copy_only=False) + np.repeat(offsets[:-1], column.value_lengths().to_numpy())
    span = np.searchsorted(starts, targets, side="right") - 1
    if len(targets):
        without = (span < 0) | (starts[span] < offsets[sequence]) if len(starts) else np.ones(len(targets), bool)
        if without.any():
            raise ValueError(f"step {step}, row {rows[sequence[without][0]]}: a trainable token lies before the first version span")
    return spans.field("policy_version").to_numpy(zero_copy_only=False)[span] if len(targets) else np.zeros(0, np.int64)
