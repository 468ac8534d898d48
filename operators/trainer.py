"""One DeepSpeed rank: steps, publication, checkpoints. Knows nothing of Flink and Kafka.

Promises: the gradient of a step is the sum over its global batch divided by the denominator, whatever the number of ranks,
micro-batches and rows; every rank makes the same number of passes; a step that is run again from the same checkpoint makes the same
bits. All ranks call the same methods in the same order: each of them may hold a collective operation.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import random
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import torch.distributed as dist

from operators import checkpoint, losses, microbatch, weights
from operators.checkpoint import BadCheckpoint, Marker
from operators.forward import BadModel, check_packing, load_model, pack, token_logprobs
from schemas.records import Manifest, Weights
from schemas.settings import Settings

#: Not weights: these files of the start model's folder go into the final one. A weight file or its index does not.
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")

log = logging.getLogger(__name__)


class NotFinite(FloatingPointError):
    """The loss or gradient of a step is not finite; the text names the step and the rows."""


def device_of(settings: Settings) -> str:
    """cpu or cuda."""
    wanted = settings.training.device
    return wanted if wanted != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def learning_rate(step: int, settings: Settings) -> float:
    """Of step 1, 2, ...: linear warm-up to `lr`, then linear decay to `lr * lr_min_ratio` at `decay_steps`."""
    t = settings.training
    if step <= t.warmup_steps:
        return t.lr * step / t.warmup_steps
    if t.decay_steps is None:
        return t.lr
    done = min(1.0, (step - t.warmup_steps) / max(1, t.decay_steps - t.warmup_steps))
    return t.lr * (1 - done * (1 - t.lr_min_ratio))


def deepspeed_config(settings: Settings, parameters: int) -> dict:
    t = settings.training
    zero: dict = {"stage": t.zero_stage}
    if t.zero_stage:
        # The default bucket of 5e8 elements is allocated at once, however small the model.
        zero |= {"reduce_bucket_size": min(parameters, 500_000_000), "allgather_bucket_size": min(parameters, 500_000_000)}
    if t.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    config: dict = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": t.gradient_clipping,
        "steps_per_print": 10**9, "zero_optimization": zero, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False,
    }
    if t.dtype == "bfloat16":
        config |= {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    return config


class Trainer:
    """A rank of `world`; the process group exists already (`rendezvous.join`).

        trainer = Trainer(settings, rank, world)
        trainer.restore()                                    # version 0, or the newest usable checkpoint's
        metrics = trainer.train(manifest, tables)            # this rank's micro-batches; moves the version
        staged = trainer.stage_weights()                     # bytes on disk; None on other ranks than 0
        trainer.save_checkpoint(epoch, staged.digest)
    """

    def __init__(self, settings: Settings, rank: int = 0, world: int = 1):
        import deepspeed

        self.settings, self.rank, self.world = settings, rank, world
        self.version = 0
        t = settings.training
        self.device = torch.device(device_of(settings))
        if self.device.type == "cuda":
            self.device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        else:
            torch.set_num_threads(t.threads)
        self._shapes = weights.expected_tensors(settings.model.path)
        self._seed()
        config = deepspeed_config(settings, sum(torch.Size(s).numel() for s in self._shapes.values()))
        model = self._load(config)
        # One kernel over each flat partition; an optimizer of torch compiles nothing.
        optimizer = torch.optim.AdamW(model.parameters(), lr=t.lr, betas=t.betas, weight_decay=t.weight_decay, fused=True)
        self.engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.module: torch.nn.Module = self.engine.module
        self.module.train()
        check_packing(self.engine, 1e-3 if t.dtype == "float32" else 0.2)
        self._named = dict(self.module.named_parameters(remove_duplicate=False)) | dict(self.module.named_buffers(remove_duplicate=False))
        if missing := sorted(self._shapes.keys() - self._named.keys()):
            raise BadModel(f"{settings.model.path}: {type(self.module).__name__} has no tensor {missing[0]!r} "
                           f"({len(missing)} in all); its weights cannot be published under the names of its folder")
        w = settings.weights
        self._deltas = weights.Deltas(w.full_every or weights.FULL_EVERY) if w.encoding == "delta" else None
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]

    def _load(self, config: dict) -> torch.nn.Module:
        s = self.settings
        keep = None
        if s.training.zero_stage == 3:
            from transformers.integrations import HfDeepSpeedConfig, unset_hf_deepspeed_config

            keep = HfDeepSpeedConfig(config)  # while it lives, from_pretrained partitions parameters as it reads them
        try:
            model = load_model(s.model, dtype=s.training.dtype, attention=s.training.attention)
        finally:
            if keep is not None:
                unset_hf_deepspeed_config()
        if s.training.gradient_checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model

    def _seed(self) -> None:
        seed = self.settings.run.seed * 1_000_003 + self.rank
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)

    # A step ------------------------------------------------------------------------------------------------------------------

    def train(self, manifest: Manifest, mine: list[pa.Table]) -> dict[str, float]:
        """One optimizer step: this rank's micro-batches (index = rank mod world, in order) of the manifest's step.

        Returns the measures of the whole step by MLflow name, the same on every rank. Raises NotFinite before any weight changes
        if the loss is not finite, and ValueError if rows cannot be trained on.
        """
        began = time.perf_counter()
        t = self.settings.training
        if manifest.step != self.version + 1:
            raise ValueError(f"step {manifest.step} cannot be trained by version {self.version}: steps come in order")
        denominator = {"sequences": manifest.sequences, "tokens": manifest.trainable_tokens, "groups": manifest.groups}[t.denominator]
        if denominator <= 0:
            raise ValueError(f"step {manifest.step} has no {t.denominator} to divide by")
        passes = -(-len(manifest.micro_batch_offsets) // self.world)
        expected = len(range(self.rank, len(manifest.micro_batch_offsets), self.world))
        if len(mine) != expected:
            raise ValueError(f"step {manifest.step}: rank {self.rank} has {len(mine)} micro-batches, its share is {expected}")
        # Data parallelism averages over the ranks; the gradient is a sum.
        scale = self.world / denominator
        measures = torch.zeros(len(losses.MEASURES), dtype=torch.float64, device=self.device)
        counts = np.zeros(len(microbatch.COUNTS) + microbatch.LAGS)
        seen: list[tuple[torch.Tensor, list[str]]] = []
        for i in range(passes):
            self.engine.set_gradient_accumulation_boundary(i == passes - 1)
            batch = microbatch.read(mine[i], self.device) if i < len(mine) else None
            if batch is None or not len(batch.packed.targets):
                loss = self._nothing()
            else:
                loss, found = self._loss(batch)
                measures[:-1] += found[:-1]
                measures[-1] = torch.maximum(measures[-1], found[-1])
                seen.append((found, batch.rows))
                loss = loss * scale
            if batch is not None:
                counts += batch.counts
            self.engine.backward(loss, scale_wrt_gas=False)
        sums = self._reduce(measures, counts)
        if not np.isfinite(sums["loss"]):
            rows = [row for found, names in seen if not torch.isfinite(found[1]) for row in names]
            where = f"among the rows {', '.join(rows)}" if rows else "in a micro-batch of another rank"
            raise NotFinite(f"the loss of step {manifest.step} is not finite, {where}; no weight was changed")
        lr = learning_rate(manifest.step, self.settings)
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        norm = self._step()
        if not np.isfinite(norm):
            raise NotFinite(f"the gradient of step {manifest.step} is not finite though its loss is: the weights are spoilt, "
                            "the job starts again from its checkpoint")
        self.version = manifest.step
        metrics = losses.summary(sums, denominator) | {"grad_norm": norm, "lr": lr} | _lags(sums["lags"])
        rows = max(sums["sequences"], 1)
        seconds = time.perf_counter() - began
        return metrics | {
            "seq/spans_mean": sums["spans"] / rows, "seq/length_mean": sums["response_tokens"] / rows,
            "train/tokens": sums["packed_tokens"], "train/seconds": seconds, "train/tokens_per_s": sums["packed_tokens"] / seconds,
        }

    def _loss(self, batch: microbatch.MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        t = self.settings.training
        new, entropy = token_logprobs(self.engine, batch.packed, entropy=True)
        tokens = losses.Tokens(new, batch.behaviour, batch.advantage, batch.packed.sequence, batch.packed.sequences,
                               batch.reference, entropy, batch.on_policy, batch.position, batch.lag)
        return losses.step_loss(tokens, t.loss, kl_coef=t.kl_coef, kl_weighted=t.kl_importance_weighted, entropy_coef=t.entropy_coef)

    def _nothing(self) -> torch.Tensor:
        """A pass that adds nothing, for a rank with fewer micro-batches: every rank takes part in every collective operation."""
        two = pack(np.zeros(2, np.int64), np.array([0, 2]), np.array([1]), np.ones(1), self.device)
        return token_logprobs(self.engine, two)[0].sum() * 0.0

    def _step(self) -> float:
        """The optimizer step; the norm of the gradient before it was clipped."""
        if self.settings.training.zero_stage:
            self.engine.step()
            return float(self.engine.get_global_grad_norm())
        # Without ZeRO the engine clips and forgets the norm. The gradients are reduced already.
        norm = torch.nn.utils.get_total_norm([p.grad for p in self._parameters if p.grad is not None])
        self.engine.step()
        return float(norm)

    def _reduce(self, measures: torch.Tensor, counts: np.ndarray) -> dict:
        mine = torch.cat([measures, torch.from_numpy(counts).to(self.device)])
        everyone = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(everyone, mine)
        total = torch.stack(everyone)
        total = torch.cat([total[:, :len(losses.MEASURES) - 1].sum(0), total[:, len(losses.MEASURES) - 1].max()[None],
                           total[:, len(losses.MEASURES):].sum(0)]).tolist()  # the step's one wait for the device
        names = (*losses.MEASURES, *microbatch.COUNTS)
        return dict(zip(names, total, strict=False)) | {"lags": np.array(total[len(names):])}

    # Weights -----------------------------------------------------------------------------------------------------------------

    def stage_weights(self, base: Weights | None = None) -> weights.Staged | None:
        """Write the current weights, complete and digested but not yet named. All ranks call it; None on all but rank 0.

        `base` is the event of the version offered last, which the settings may want a delta to.
        """
        layout = self._layout()
        if self.rank == 0:
            full = weights.stage(self.settings.weights_dir, layout, self._gathered(layout), self.settings.generation.dtype)
            return self._deltas.stage(full, self.version, base) if self._deltas is not None else full
        for _ in self._gathered(layout):
            pass
        return None

    def _layout(self) -> dict[str, weights.Spec]:
        dtype = getattr(torch, self.settings.generation.dtype)
        return {n: weights.Spec(shape, dtype if self._named[n].is_floating_point() else self._named[n].dtype)
                for n, shape in self._shapes.items()}

    def _gathered(self, layout: dict[str, weights.Spec]) -> Iterator[tuple[str, torch.Tensor]]:
        """Whole tensors in file order. Under ZeRO-3 one at a time is gathered, on all ranks: never the model as a whole."""
        import deepspeed

        partitioned = self.settings.training.zero_stage == 3
        for name in weights.file_order(layout):
            tensor = self._named[name]
            with deepspeed.zero.GatheredParameters([tensor], enabled=partitioned and hasattr(tensor, "ds_id")):
                yield name, tensor

    def prune_weights(self, keep: set[int]) -> None:
        """Remove the bytes of other versions. Rank 0."""
        weights.prune(self.settings.weights_dir, keep)

    def export_model(self, event: Weights) -> Path:
        """The final model as a Hugging Face folder, with `pipelinerl.json` that says what it is. Complete or absent. Rank 0."""
        target = self.settings.run_dir / "model"
        what = {"run_id": event.run_id, "version": event.version, "digest": event.digest}
        with contextlib.suppress(FileNotFoundError):
            if json.loads((target / "pipelinerl.json").read_text()) == what:
                return target
        building = target.with_name("model.tmp")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        for file in Path(self.settings.model.path).iterdir():
            if file.is_file() and not file.name.endswith(WEIGHT_SUFFIXES):
                shutil.copy2(file, building / file.name)
        config = json.loads((building / "config.json").read_text())
        config.pop("torch_dtype", None)
        config["dtype"] = self.settings.generation.dtype
        (building / "config.json").write_text(json.dumps(config, indent=2))
        (building / "model.safetensors").write_bytes(weights.fetch(event))
        (building / "pipelinerl.json").write_text(json.dumps(what))
        shutil.rmtree(target, ignore_errors=True)
        os.replace(building, target)
        return target

    # Checkpoints -------------------------------------------------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        return self.settings.run_dir / "checkpoints"

    def due(self) -> bool:
        """The settings want a checkpoint after this version."""
        return self.version % self.settings.training.checkpoint_every == 0

    def save_checkpoint(self, epoch: int, digest: str) -> Path:
        """All ranks. It counts when the marker is there, after all ranks have written. epoch and digest are rank 0's to say."""
        path = self.checkpoints / checkpoint.tag(self.version)
        if self.rank == 0:
            checkpoint.clear(self.checkpoints, self.version)
        dist.barrier()
        said: list = [(epoch, digest)]
        dist.broadcast_object_list(said, src=0)
        epoch, digest = said[0]
        states: list = [None] * self.world
        dist.all_gather_object(states, self._random_state())
        self.engine.save_checkpoint(str(self.checkpoints), tag=path.name, save_latest=False, client_state={
            "epoch": epoch, "version": self.version, "next_step": self.version + 1, "digest": digest, "random": states})
        names = checkpoint.file_names(path)
        shares: list = [None] * self.world
        dist.all_gather_object(shares, {n: checkpoint.digest_of(path / n) for n in names[self.rank::self.world]})
        if self.rank == 0:
            files = {n: d for share in shares for n, d in share.items()}
            checkpoint.commit(path, Marker(self.settings.run.id, self.version, epoch, digest, self.world, files))
            checkpoint.prune(self.checkpoints, self.settings.training.keep_checkpoints)
        dist.barrier()
        return path

    def restore(self) -> Marker | None:
        """Take up the newest usable checkpoint; None if there is none. All ranks. Raises BadCheckpoint if its ranks were others."""
        found: list = [checkpoint.markers(self.checkpoints)]
        dist.broadcast_object_list(found, src=0)  # a shared folder may show ranks different things for a moment
        for path, marker in found[0]:
            if marker.run_id != self.settings.run.id:
                raise BadCheckpoint(f"{path} belongs to run {marker.run_id!r}, not {self.settings.run.id!r}: take another run.dir")
            if marker.world != self.world:
                raise BadCheckpoint(f"{path} was written by {marker.world} ranks and cannot be resumed by {self.world}: "
                                    f"set training.ranks = {marker.world}")
            damaged: list = [None] * self.world
            dist.all_gather_object(damaged, checkpoint.damaged(path, marker, self.rank, self.world))
            if broken := [name for share in damaged for name in share]:
                log.warning(f"checkpoint {path} is damaged ({', '.join(broken)}): the one before is used")
                if self.rank == 0:
                    (path / checkpoint.MARKER).unlink(missing_ok=True)  # it must not count when older ones are removed
                continue
            _, state = self.engine.load_checkpoint(str(self.checkpoints), tag=path.name)
            self._set_random_state(state["random"][self.rank])
            self.version = state["version"]
            return marker
        return None

    def _random_state(self) -> dict:
        state = {"torch": torch.get_rng_state(), "numpy": np.random.get_state(), "python": random.getstate()}
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def _set_random_state(self, state: dict) -> None:
        torch.set_rng_state(state["torch"])
        np.random.set_state(state["numpy"])
        random.setstate(state["python"])
        if "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


def _lags(histogram: np.ndarray) -> dict[str, float]:
    n = histogram.sum()
    if not n:
        return {}
    at = np.arange(len(histogram))
    return {"lag/mean": float((histogram * at).sum() / n), "lag/max": float(np.flatnonzero(histogram).max()),
            "lag/p95": float(np.searchsorted(np.cumsum(histogram), 0.95 * n))}
