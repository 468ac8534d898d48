"""The reference model in a process of its own: takes whatever rollouts wait, scores them in packed forward passes, sends them back.

Promises: a record that waits is scored with all others that wait, up to the token budget a pass, and none waits for others to come; only
`ref_logprobs` and `ref_model` of a row change. Started by `operators.reference`.
"""

from __future__ import annotations

import hashlib
import os
import queue
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from operators.packing import consecutive
from operators.reference_frames import READY, REFUSED, SCORE, SCORED, pack_record, unpack_record
from schemas.record import BadRecord, encode_batch, read
from schemas.records import Rollout
from schemas.settings import ModelSettings


class Reference:
    """A model, and `score`."""

    def __init__(self, model: ModelSettings, *, dtype: str, attention: str, token_budget: int, device: str):
        from operators.forward import check_packing, load_model

        self.token_budget, self.device = token_budget, device
        self.model = load_model(model, dtype=dtype, attention=attention).to(device).eval()
        check_packing(self.model, 1e-3 if dtype == "float32" else 0.2)
        path = Path(model.path)
        self.name = f"{path.name}@{_digest(path)[:12]}"
        self._vocabulary = self.model.get_input_embeddings().weight.shape[0]

    def check(self, table: pa.Table) -> None:
        """Raises BadRecord, naming the row, for rollouts that cannot be scored."""
        from operators.forward import lists

        token_ids, offsets = lists(table.column("token_ids"))
        names = [f"{g}#{s}" for g, s in zip(table.column("group_id").to_pylist(), table.column("sample_index").to_pylist(), strict=True)]
        lengths = np.diff(lists(table.column("rollout_logprobs"))[1])
        if (wrong := np.flatnonzero(lengths != np.diff(offsets))).size:
            raise BadRecord(f"rollout {names[wrong[0]]}: rollout_logprobs has {lengths[wrong[0]]} entries for its tokens")
        outside = (token_ids < 0) | (token_ids >= self._vocabulary)
        if outside.any():
            at = int(np.flatnonzero(outside)[0])
            row = int(np.searchsorted(offsets, at, side="right")) - 1
            raise BadRecord(f"rollout {names[row]}: token id {token_ids[at]} is not in the reference model's vocabulary of "
                            f"{self._vocabulary}")
        if table.column("rollout_logprobs").combine_chunks().flatten().null_count == len(token_ids):
            return  # nothing to score: an evaluation, or a prompt that was refused
        temperature = _temperatures(table)
        if (wrong := np.flatnonzero(~(np.isfinite(temperature) & (temperature > 0)))).size:
            raise BadRecord(f"rollout {names[wrong[0]]}: sampling.temperature is {temperature[wrong[0]]}, it must be greater than 0")

    def sound(self, table: pa.Table) -> tuple[pa.Table, list[tuple[str, pa.Table]]]:
        """(the rollouts that can be scored, [(cause, a rollout that cannot)])."""
        try:
            self.check(table)
            return table, []
        except BadRecord as e:
            if table.num_rows == 1:
                return table.slice(1), [(str(e), table)]
        apart = [self.sound(table.slice(i, 1)) for i in range(table.num_rows)]
        return pa.concat_tables([good for good, _ in apart]), [bad for _, found in apart for bad in found]

    def score(self, tables: Sequence[pa.Table]) -> list[pa.Table]:
        """The tables with ref_logprobs, at each row's temperature and null where not sampled, and ref_model filled in.

        Rows without sampled tokens stay as they are.
        """
        from operators.forward import lists, with_predecessor

        ids, sampled, lengths = [], [], []
        for table in tables:
            values, offsets = lists(table.column("token_ids"))
            ids.append(values)
            lengths.append(np.diff(offsets))
            sampled.append(table.column("rollout_logprobs").combine_chunks().flatten().is_valid().to_numpy(zero_copy_only=False))
        token_ids, sizes = np.concatenate(ids), np.concatenate(lengths)
        temperature = np.concatenate([_temperatures(table) for table in tables])
        offsets = np.concatenate([[0], np.cumsum(sizes)])
        targets = with_predecessor(np.concatenate(sampled), offsets)
        found = np.full(len(token_ids), np.nan, np.float32)
        rows = np.unique(np.searchsorted(offsets, targets, side="right") - 1)  # those with something to score
        for part in consecutive(sizes[rows], self.token_budget):
            self._forward(rows[part], token_ids, offsets, targets, temperature, found)
        has = np.zeros(len(token_ids), bool)
        has[targets] = True
        out, token, row = [], 0, 0
        for table, n in zip(tables, lengths, strict=True):
            tokens = slice(token, token + int(n.sum()))
            out.append(self._filled(table, n, found[tokens], has[tokens], np.isin(np.arange(row, row + len(n)), rows)))
            token, row = tokens.stop, row + len(n)
        return out

    def _forward(self, rows: np.ndarray, token_ids, offsets, targets, temperature, found: np.ndarray) -> None:
        import torch

        from operators.forward import pack, token_logprobs

        n = offsets[rows + 1] - offsets[rows]
        starts = np.concatenate([[0], np.cumsum(n)])
        tokens = np.arange(starts[-1]) - np.repeat(starts[:-1], n) + np.repeat(offsets[rows], n)  # of these rows, in all
        chosen = np.flatnonzero(np.isin(tokens, targets, assume_unique=True))
        with torch.inference_mode():
            packed = pack(token_ids[tokens], starts, chosen, temperature[rows], self.device)
            logprobs, _ = token_logprobs(self.model, packed)
        found[tokens[chosen]] = logprobs.cpu().numpy()

    def _filled(self, table: pa.Table, lengths: np.ndarray, values: np.ndarray, has: np.ndarray, rows: np.ndarray) -> pa.Table:
        if not rows.any():
            return table
        offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
        logprobs = pa.ListArray.from_arrays(offsets, pa.array(values, mask=~has), mask=pa.array(~rows))
        columns = list(table.columns)
        schema = table.schema
        for name, array in (("ref_logprobs", logprobs), ("ref_model", pa.array([self.name if r else None for r in rows]))):
            i = schema.get_field_index(name)
            columns[i] = array.cast(schema.field(i).type)
        return pa.Table.from_arrays(columns, schema=schema)


def _temperatures(table: pa.Table) -> np.ndarray:
    return table.column("sampling").combine_chunks().field("temperature").to_numpy(zero_copy_only=False).astype(np.float64)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted([folder / "config.json", *folder.glob("*.safetensors")]):
        with open(file, "rb") as f:
            digest.update(hashlib.file_digest(f, "sha256").digest())
    return digest.hexdigest()


def waiting(records: queue.SimpleQueue, budget: int) -> list[tuple[str, bytes]]:
    """Block for one record, then take what else is there, until their bytes are surely more than a pass can hold."""
    taken = [records.get()]
    size = len(taken[0][1])
    while size < 16 * budget:
        try:
            taken.append(records.get_nowait())
        except queue.Empty:
            break
        size += len(taken[-1][1])
    return taken


def main() -> None:
    from operators.child import Parent

    parent = Parent()
    config = parent.config
    os.environ["DS_ACCELERATOR"] = config["device"]  # transformers imports DeepSpeed, which looks for one
    import torch

    torch.set_num_threads(config.pop("threads"))
    reference = Reference(ModelSettings.model_validate(config.pop("model")), **config)
    parent.send(READY, reference.name.encode())
    records: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()

    def listen() -> None:
        for kind, payload in parent.incoming():
            if kind == SCORE:
                records.put(unpack_record(payload))

    threading.Thread(target=listen, name="frames", daemon=True).start()
    while True:
        taken: list[tuple[str, pa.Table]] = []
        for ident, record in waiting(records, reference.token_budget):
            try:
                table = read(Rollout, record)
            except BadRecord as e:
                parent.send(REFUSED, pack_record(str(e), record))
                parent.send(SCORED, pack_record(ident, b""))
                continue
            good, refused = reference.sound(table)
            for cause, row in refused:
                parent.send(REFUSED, pack_record(cause, encode_batch(row)))
            if good.num_rows:
                taken.append((ident, good))
            else:
                parent.send(SCORED, pack_record(ident, b""))
        if not taken:
            continue
        for (ident, _), scored in zip(taken, reference.score([table for _, table in taken]), strict=True):
            parent.send(SCORED, pack_record(ident, encode_batch(scored)))


if __name__ == "__main__":
    main()
