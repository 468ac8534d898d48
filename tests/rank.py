"""A rank in a process of its own: `python -m tests.rank RANK WORLD MODEL FOLDER STAGE`.

Trains a step, publishes and keeps it, trains another; then takes up the checkpoint and trains that again. Rank 0 saves what came of it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

MICRO_BATCHES = 3  # not a multiple of two ranks


def gradient(trainer) -> dict:
    """Of the step just trained: AdamW's first moment after its first step is (1 - beta1) times it. All ranks call it."""
    from deepspeed.utils import safe_get_full_optimizer_state

    beta1 = trainer.settings.training.betas[0]
    return {n: safe_get_full_optimizer_state(p, "exp_avg") / (1 - beta1) for n, p in trainer.module.named_parameters()}


def main() -> None:
    import torch
    from safetensors.torch import load_file

    from operators import rendezvous, weights
    from operators.trainer import Trainer
    from tests import batches

    rank, world, stage = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[5])
    folder = Path(sys.argv[4])
    settings = batches.settings(sys.argv[3], folder, ranks=world, gradient_clipping=1e9, zero_stage=stage)
    rendezvous.join(settings, rank, world, "cpu")

    def train(trainer: Trainer, number: int) -> tuple[dict, weights.Staged | None]:
        manifest, tables = batches.step(number, MICRO_BATCHES)
        return trainer.train(manifest, tables[rank::world]), trainer.stage_weights()

    trainer = Trainer(settings, rank, world)
    metrics, first = train(trainer, 1)
    found = gradient(trainer)
    trainer.save_checkpoint(0, first.digest if first else "")
    _, second = train(trainer, 2)
    again = Trainer(settings, rank, world)
    restored = again.restore().version
    _, same = train(again, 2)
    if rank == 0:
        torch.save({"metrics": metrics, "gradient": found, "published": load_file(first.path), "restored": restored,
                    "digests": (second.digest, same.digest)}, folder / "made.pt")
    torch.distributed.barrier()
    rendezvous.leave()


if __name__ == "__main__":
    main()
