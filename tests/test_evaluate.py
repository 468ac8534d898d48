import json

import pyarrow.parquet as pq
import pytest

from deploy.models import make_demo_model
from jobs.cli import main
from jobs.evaluate import Score, report
from operators.evaluation import figures, pass_at_k
from schemas.records import Rollout


def test_pass_at_k_is_unbiased():
    from itertools import combinations

    right = [1, 1, 0, 0, 0]
    for k in range(1, 6):
        chosen = list(combinations(right, k))
        assert pass_at_k(5, 2, k) == pytest.approx(sum(any(c) for c in chosen) / len(chosen))


def test_what_nobody_could_grade_counts_as_wrong_and_is_counted():
    s = Score(**vars(figures([[1.0, 0.0], [None, 0.5]], 1.0)), temperature=1.0, truncated=0.0, tokens=1, seconds=1.0, policy_version=None)
    assert (s.reward, s.ungraded) == (0.375, 1)
    assert s.pass_at == {1: 0.25, 2: 0.5} and s.pass_at_1_error == pytest.approx(0.25)
    assert json.loads(report(s).splitlines()[-1])["pass_at"] == {"1": 0.25, "2": 0.5}


def test_a_model_folder_is_evaluated(tmp_path, capsys):
    """The real engine: one answer a prompt greedily, and a prompt it cannot take."""
    model = make_demo_model(tmp_path / "model", seed=0)
    file = tmp_path / "held-out.jsonl"
    rows = [{"question": f"{n:02d}=", "answer": "1" * n} for n in (2, 3, 5, 8)] + [{"question": "1" * 90, "answer": "1"}]
    file.write_text("\n".join(json.dumps(r) for r in rows))
    flags = ["--prompt-column", "question", "--task", "characters", "--generation.dtype", "float32", "--generation.max_model_len", "64",
             "--generation.max_tokens", "50", "--generation.kv_cache_mb", "32", "--generation.batch", "3"]
    with pytest.raises(SystemExit) as e:
        main(["eval", str(model), "--prompts", str(file), "--greedy", "--to", str(tmp_path / "answers.parquet"), *flags])
    assert e.value.code == 0
    said = capsys.readouterr().out
    assert "tokens, which leaves no room for a response: generation.max_model_len is 64" in said
    made = json.loads(said.splitlines()[-1])
    assert (made["prompts"], made["samples"], made["ungraded"]) == (5, 1, 1)
    table = pq.read_table(tmp_path / "answers.parquet")
    assert table.column_names == Rollout.arrow_schema.names and table.num_rows == 5
    rewards = [r or 0.0 for r in table.column("reward").to_pylist()]
    assert made["reward"] == pytest.approx(sum(rewards) / 5) and any(rewards)
    for prompt, text, reward in zip(rows, table.column("completion").to_pylist(), table.column("reward").to_pylist(), strict=True):
        assert reward is None or (reward == 1) == (text == prompt["answer"])


def test_a_folder_whose_weights_cannot_be_read_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with pytest.raises(SystemExit, match=r"is no model folder: model\.safetensors cannot be read"):
        main(["eval", str(tmp_path), "--prompts", "demo", "--size", "2"])


@pytest.mark.parametrize(("arguments", "message"), [
    (["nowhere", "--prompts", "demo"], "is no model folder"), (["MODEL", "--prompts", "demo", "--size", "4", "--greedy", "--samples", "4"], "one is enough"),
    (["MODEL", "--prompts", "demo", "--size", "4", "--to", "x.csv"], "a .parquet file"), (["MODEL", "--prompts", "x.jsonl"], "say who grades")])
def test_what_makes_no_sense_is_said(tmp_path, arguments, message):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match=message):
        main(["eval", *(str(tmp_path) if a == "MODEL" else a for a in arguments)])
