"""The other side of `trl`: TRL's GRPOTrainer, run in an environment of its own (`python -m tests.benchmarks.trl_side CONFIG`).

Set as its documentation advises for speed without a vLLM server: no gradient checkpointing, no reference model (beta 0), one optimizer step a
generation (`num_iterations` 1), transformers' own `generate`, sdpa attention. CONFIG is a JSON file; the result is its last line of output:
{"rollouts": [[began, ended, version, reward], ...], "steps": [finished, ...], "tokens": [of each step]}, times in seconds since the epoch.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path


def main(path: str) -> None:
    config = json.loads(Path(path).read_text())
    import torch

    torch.set_num_threads(config["threads"])
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from operators.tasks import characters

    rollouts, steps, tokens = [], [], []

    class Times(TrainerCallback):
        """When each step began and ended: the generation of a step's samples is part of it."""

        def on_train_begin(self, *_, **__):
            self.began = time.time()

        def on_step_end(self, *_, **__):
            self.began = time.time()
            steps.append(self.began)

    times = Times()

    def reward(completions: list[str], answer: list[str], completion_ids: list[list[int]], **_) -> list[float]:
        values = [characters(c, a)["characters"] for c, a in zip(completions, answer, strict=True)]
        rollouts.extend((times.began, time.time(), len(steps), v) for v in values)
        tokens.append(sum(map(len, completion_ids)))
        return values

    samples = config["samples"]
    arguments = GRPOConfig(
        output_dir=config["folder"], max_steps=config["steps"], per_device_train_batch_size=samples, gradient_accumulation_steps=1,
        num_generations=config["group_size"], max_completion_length=config["max_tokens"], temperature=1.0, learning_rate=config["lr"],
        adam_beta1=config["betas"][0], adam_beta2=config["betas"][1], weight_decay=0.0, max_grad_norm=config["gradient_clipping"],
        lr_scheduler_type="constant_with_warmup", warmup_steps=config["warmup_steps"], beta=0.0, num_iterations=1, scale_rewards="none",
        loss_type="dapo", gradient_checkpointing=False, use_cpu=True, bf16=False, optim="adamw_torch_fused", seed=config["seed"],
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True)
    model = AutoModelForCausalLM.from_pretrained(config["model"], dtype=torch.float32)
    rows = [json.loads(line) for line in Path(config["prompts"]).read_text().splitlines()]
    trainer = GRPOTrainer(model, reward, args=arguments, train_dataset=Dataset.from_list(rows), callbacks=[times],
                          processing_class=AutoTokenizer.from_pretrained(config["model"], padding_side="left"))
    trainer.train()
    print(json.dumps({"rollouts": rollouts, "steps": steps, "tokens": tokens}))


if __name__ == "__main__":
    main(*sys.argv[1:])
