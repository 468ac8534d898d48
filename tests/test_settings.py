import subprocess
import sys
from pathlib import Path

import pytest

from jobs.cli import flags_of
from schemas.settings import BadSettings, ReinforceLoss, Settings, documentation, fields, load


def test_the_articles_flags_reach_the_tree():
    s = load(flags=flags_of(["--actor_gpus", "4", "--trainer_gpus=2", "generation_batch=192", "--training_batch", "1024", "--pipeline_depth", "2",
                             "--kv_cache_mode", "reuse", "--importance_weight_clip", "4", "--max_lag", "3", "--penalize_length",
                             "--dynamic_batching", "true"]))
    assert (s.generation.engines, s.training.ranks, s.generation.batch, s.training.batch) == (4, 2, 192, 1024)
    assert (s.packing.pipeline_depth, s.generation.kv_cache_mode, s.training.loss, s.training.max_lag) == (
        2, "reuse", ReinforceLoss(importance_weight_clip=4.0), 3)
    assert s.reward.penalize_length and s.packing.dynamic_batching


def test_the_credit_of_the_design():
    s = load(flags={"training_batch": "1024", "max_lag": "2", "grouping.group_size": "8"})
    assert s.credit // s.grouping.group_size == 384


def test_file_environment_flags_in_this_order(tmp_path, monkeypatch):
    file = tmp_path / "s.toml"
    file.write_text("[training]\nlr = 1e-3\nbatch = 64\nmax_lag = 1\n")
    monkeypatch.setenv("PIPELINERL_TRAINING__BATCH", "32")
    monkeypatch.setenv("PIPELINERL_TRAINING__MAX_LAG", "4")
    s = load(file, {"training.max_lag": "0"})
    assert (s.training.lr, s.training.batch, s.training.max_lag) == (1e-3, 32, 0)


@pytest.mark.parametrize(("flags", "words"), [
    ({"training.batch": "30"}, "divisible by grouping.group_size"),
    ({"training.kl_coef": "0.1", "reference.enabled": "false"}, "kl_coef needs reference"),
    ({"packing.dynamic_batching": "false"}, "micro_batch_size goes with"),
    ({"packing.micro_batch_size": "4"}, "micro_batch_size goes with"),
    ({"generation.max_tokens": "512", "generation.max_model_len": "512"}, "no room for a prompt"),
    ({"generation.engines": "9"}, "slots"),
    ({"training.zero_stage": "0", "training.dtype": "bfloat16"}, "zero_stage 0"),
    ({"run.id": "a.b"}, "names topics"),
    ({"kafka.sasl_username": "u"}, "go with a SASL"),
    ({"training.lr": "fast"}, "training.lr"),
    ({"training.loss.kind": "grpo"}, "training.loss"),
    ({"training.max_lag": "-1"}, "training.max_lag"),
    ({"weights.full_every": "5"}, "full_every goes with weights.encoding = delta"),
    ({"weights.chunked_generation": "512"}, "with `1 version` nothing waits"),
    ({"weights.update_every": "300"}, "weights.update_every"),
])
def test_what_contradicts_or_does_nothing_is_refused(flags, words):
    with pytest.raises(BadSettings, match=words):
        load(flags=flags)


def test_when_to_update_is_a_count_and_a_unit():
    assert [load(flags={"weights.update_every": v}).weights.rule for v in ("1 version", "4 versions", "250 tokens")] == [
        (1, "version"), (4, "version"), (250, "token")]


def test_a_typo_names_the_key_and_the_right_one(tmp_path):
    file = tmp_path / "s.toml"
    file.write_text("[training]\nlearning_rat = 1e-3\nlrr = 1\n")
    with pytest.raises(BadSettings, match=r"s\.toml.*training\.lrr: unknown key; did you mean 'training\.lr'"):
        load(file)
    with pytest.raises(BadSettings, match="did you mean 'max_lag'"):
        flags_of(["--maxlag", "3"])
    with pytest.raises(BadSettings, match="no-such"):
        load(tmp_path / "no-such.toml")


def test_a_parameter_of_another_loss_is_refused():
    with pytest.raises(BadSettings, match="importance_weight_clip"):
        load(flags={"training.loss.kind": "ppo", "training.loss.importance_weight_clip": "3"})


def test_every_field_explains_itself():
    assert [k for k, (_, _, text) in fields().items() if not text] == []


def test_settings_survive_the_way_to_a_job():
    s = load(flags={"training.loss.kind": "gspo", "training.max_lag": "1"})
    assert Settings.model_validate_json(s.model_dump_json()) == s


def test_settings_import_nothing_heavy():
    code = "import sys, schemas.settings; print([m for m in ('torch', 'pyflink', 'kafka', 'pyarrow', 'vllm') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_documentation_and_settings_agree():
    assert (Path(__file__).parent.parent / "docs" / "settings.md").read_text() == documentation(), "run `make docs`"
