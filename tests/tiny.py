"""A tiny random Llama with its own byte-level tokenizer, made on the spot: no download, loads in a second."""

from __future__ import annotations

from pathlib import Path


def make_tiny_model(path: str | Path, seed: int = 0, *, tied: bool = True, vocab: int = 320, hidden: int = 64, layers: int = 2) -> Path:
    """Write a model folder (config, safetensors, tokenizer with chat template). Returns its path.

    The head dimension is 32, of which vLLM's attention on a CPU wants a multiple. Weights are wide (standard deviation 0.2), so that
    another seed gives clearly other probabilities.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        [f"{i} + {j} = {i + j}" for i in range(30) for j in range(30)],
        trainers.BpeTrainer(vocab_size=vocab, special_tokens=["<|pad|>", "<|start|>", "<|end|>"], show_progress=False,
                            initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<|pad|>", bos_token="<|start|>", eos_token="<|end|>")
    fast.chat_template = ("{% for m in messages %}<|start|>{{ m['role'] }}\n{{ m['content'] }}<|end|>\n{% endfor %}"
                          "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}")
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers, num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32, max_position_embeddings=2048, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        tie_word_embeddings=tied, initializer_range=0.2))
    model.save_pretrained(path)
    fast.save_pretrained(path)
    return Path(path)
