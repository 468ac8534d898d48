"""A rank in a process of its own: `python -m tests.rank RANK WORLD MODEL FOLDER`. Trains one step and saves its gradient."""

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

    from operators import rendezvous
    from operators.trainer import Trainer
    from tests import batches

    rank, world = int(sys.argv[1]), int(sys.argv[2])
    folder = Path(sys.argv[4])
    settings = batches.settings(sys.argv[3], folder, ranks=world, gradient_clipping=1e9)
    rendezvous.join(settings, rank, world, "cpu")
    trainer = Trainer(settings, rank, world)
    manifest, tables = batches.step(1, MICRO_BATCHES)
    metrics = trainer.train(manifest, tables[rank::world])
    found = gradient(trainer)
    if rank == 0:
        torch.save((metrics, found), folder / "gradient.pt")
    torch.distributed.barrier()
    rendezvous.leave()


if __name__ == "__main__":
    main()
