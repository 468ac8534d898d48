"""The whole loop on the real stack: Kafka, Flink, vLLM, DeepSpeed, MLflow, with a model made on the spot.

One run is shared by most tests: two ranks, reference model, KL term, a checkpoint every few steps.
"""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from deploy import flink
from deploy.models import make_demo_model
from jobs.cli import main
from jobs.dead import letters
from jobs.preprocess import CLOCKS, unresolved_since
from jobs.prompts import load_prompts
from jobs.replay import replay, topics
from jobs.run import Run, RunFailed, begun
from operators.accounting import account_topics
from operators.control import say
from operators.evaluation import is_evaluation
from operators.log import Writer, ensure_topics, producer, read
from operators.waits import waits_of
from schemas.record import encode, rows_of
from schemas.records import Admission, Dead, Evaluation, Manifest, Prompt, Rollout, Sequence, Step, Weights
from schemas.topics import ADMISSIONS, BATCHES, DEAD, EVALUATIONS, HELD_OUT, OUTCOMES, PROMPTS, ROLLOUTS, SCORED, STEPS, WEIGHTS, topic
from tests.chaos.driver import FIND
from tests.integration.conftest import SMALL

STEPS_TO_RUN = 12
LOOP = SMALL | {
    "training.max_lag": 2, "training.lr": 1e-3, "training.checkpoint_every": 5, "training.ranks": 2, "training.kl_coef": 0.01,
    "weights.keep": 100, "flink.checkpoint_interval_s": 2,
}


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("models") / "characters", seed=0)


def settings(stack, model, run_id: str, **flags):
    return stack.settings(run_id, **({"model.path": str(model)} | LOOP | flags))


def records(s, name: str, cls) -> list:
    return list(rows_of(cls, (m.value for m in read(s.kafka, topic(s.run.id, name)))))


def until(what: str, condition, seconds: float = 120):
    """The condition's first true value; fails by name when the time is over."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(0.1)
    return value


@pytest.fixture(scope="module")
def run(stack, model):
    """(settings, summary) of a run that ended by itself, with bad bytes among its prompts."""
    s = settings(stack, model, "loop", **{"run.max_steps": STEPS_TO_RUN, "evaluation.every": 4, "evaluation.samples": 2})
    ensure_topics(s.kafka, s.run.id)
    bad = Writer(s.kafka)
    bad.write(topic(s.run.id, PROMPTS), b"these are no Arrow bytes")
    bad.write(topic(s.run.id, PROMPTS), encode([Prompt(
        dataset="odd", dataset_pass=0, prompt_ordinal=0, prompt_id="too long", prompt="1" * 200, answer="1", task="characters")]))
    bad.write(topic(s.run.id, PROMPTS), encode([Prompt(
        dataset="odd", dataset_pass=0, prompt_ordinal=1, prompt_id="no such task", prompt="01+01=", answer="11", task="no_such_task")]))
    for name in (OUTCOMES, ROLLOUTS, BATCHES, STEPS, ADMISSIONS, WEIGHTS, HELD_OUT):
        bad.write(topic(s.run.id, name), b"garbage for " + name.encode())
    bad.close()

    def load(s):
        load_prompts(s, "demo", size=4, seed=99, held_out=True)
        return load_prompts(s, "demo", size=1000)

    return s, Run(s).go(load)


def test_a_run_ends_by_itself_and_adds_up(run):
    s, made = run
    assert made["steps"] == STEPS_TO_RUN and made["samples_trained"] == STEPS_TO_RUN * 32
    assert made["accounting_adds_up"], account_topics(s.kafka, s.run.id).wrong
    assert made["accounting"]["buffered"] == made["accounting"]["in_flight"] == 0
    assert made["accounting"]["end_of_run"] > 0, "samples were under way when it ended"
    assert made["lag_max"] <= 2
    assert json.loads((s.run_dir / "summary.json").read_text()) == made
    assert (s.run_dir / "learning.png").stat().st_size > 10_000


def test_held_out_prompts_are_evaluated_while_the_run_goes_on(run):
    s, made = run
    rounds = {e["version"]: e for e in made["evaluations"]}
    assert 0 in rounds and len(rounds) >= 2 and all((e["prompts"], e["samples"], e["ungraded"]) == (4, 2, 0) for e in rounds.values())
    found = records(s, EVALUATIONS, Evaluation)
    assert made["accounting"]["evaluated"] == 2 * len(found)
    version = sorted(rounds)[1]
    first = [r for r in records(s, SCORED, Rollout) if r.group_id.startswith("evaluation:") and r.dataset_pass == version]
    assert {(r.group_id, r.sample_index) for r in first} == {(f"{first[0].dataset}/{version}/{i}", j) for i in range(4) for j in range(2)}
    assert all(r.policy_version_min >= version and not any(r.loss_mask) and r.ref_logprobs is None for r in first)
    rewards = {(r.group_id, r.sample_index): r.reward for r in first}
    assert rounds[version]["reward"] == pytest.approx(sum(rewards.values()) / 8)
    assert not [x for m in records(s, BATCHES, Manifest) for x in m.samples if x["group_id"].startswith("evaluation:")]
    from operators.tracking import client

    history = {m.step: m.value for m in client(s).get_metric_history(made["mlflow_run_id"], "eval/reward")}
    assert history[version] == pytest.approx(rounds[version]["reward"])


def test_updates_land_inside_sequences(run):
    _, made = run
    assert made["rollouts_spanning_versions"] > 0
    assert made["weight_updates_applied"] >= STEPS_TO_RUN - 1
    assert made["updates_seen_inside_a_sequence"] >= 2, "engines of so small a run wait for credit most of the time"


def test_every_step_says_what_it_measured(run):
    s, _ = run
    steps = records(s, STEPS, Step)
    assert [x.step for x in steps if x.step] == list(range(1, STEPS_TO_RUN + 1))
    wanted = {"reward", "loss", "grad_norm", "lag/mean", "lag/p95", "lag/max", "ess/raw", "ess/clipped", "is_ratio/mean", "is_ratio/max",
              "is_ratio/clipped_frac", "kl/ref", "seq/spans_mean", "train/tokens_per_s", "queue/unresolved"}
    for x in steps:
        if x.step:
            assert wanted <= dict(x.metrics).keys(), wanted - dict(x.metrics).keys()
    assert {"weights/pause_ms", "weights/transfer_ms", "generation/in_flight"} <= {k for x in steps for k, _ in x.metrics}
    # Only sequences wholly of the version that trains them tell: there are none in a step that is all lag.
    assert all(dict(x.metrics).get("mismatch/kl", 0.0) < 1e-6 for x in steps), "engine and trainer agree where versions are equal"


def test_bad_records_are_dead_letters_with_a_cause(run):
    s, made = run
    dead = records(s, DEAD, Dead)
    assert any(d.stage == "admission" and d.original == b"these are no Arrow bytes" for d in dead)
    assert any("context" in d.cause and "128" in d.cause for d in dead), [d.cause for d in dead]
    assert any("no_such_task" in d.cause for d in dead)
    for name in (OUTCOMES, ROLLOUTS, BATCHES, STEPS, ADMISSIONS, WEIGHTS):
        found = {(d.stage, d.topic) for d in dead if d.original == b"garbage for " + name.encode()}
        assert found and {t for _, t in found} == {topic(s.run.id, name)}, "the letter names the topic it came from"
    assert made["accounting"]["dead"] == 8, "two groups of four could not be used"


def test_dead_letters_can_be_listed_shown_and_sent_again(run, capsys, tmp_path):
    s, _ = run

    def dead(*arguments: str) -> str:
        with pytest.raises(SystemExit) as e:
            main(["dead", *arguments, "--run.id", s.run.id, "--kafka.bootstrap", s.kafka.bootstrap])
        if isinstance(e.value.code, str):
            return e.value.code
        return capsys.readouterr().out

    lines = dead("list").splitlines()
    assert len(lines) == 1 + len(records(s, DEAD, Dead))
    found = letters(s.kafka, s.run.id)
    number = str(next(n for n, d in found.items() if d.original == b"these are no Arrow bytes"))
    owned = str(next(n for n, d in found.items() if d.topic == topic(s.run.id, BATCHES)))
    assert f"{s.run.id}.prompts: " in next(line for line in lines if line.split()[0] == number)
    shown = dead("show", number, "--to", str(tmp_path / "bytes"))
    assert "these are no Arrow bytes" in shown and (tmp_path / "bytes").read_bytes() == b"these are no Arrow bytes"
    named = next(n for n, d in found.items() if d.group_id is not None and "context" in d.cause)
    assert '"prompt_id": "too long"' in dead("show", str(named))
    before = sum(1 for _ in read(s.kafka, topic(s.run.id, PROMPTS)))
    assert "1 sent again" in dead("retry", number)
    again = [m.value for m in read(s.kafka, topic(s.run.id, PROMPTS))][before:]
    assert again == [b"these are no Arrow bytes"]
    assert "has one writer" in dead("retry", owned)
    assert "have their outcome (dead), which is final" in dead("retry", str(named))
    assert "no dead letter 99999" in dead("show", "99999") and "takes one number" in dead("show")


def test_the_bytes_that_trained_the_model_are_the_bytes_in_the_log(run):
    s, _ = run
    scored = {r.rollout_id: r for r in records(s, SCORED, Rollout)}
    rows = records(s, BATCHES, Sequence)
    manifests = [m for m in records(s, BATCHES, Manifest) if m.kind == "step"]
    assert [m.step for m in manifests] == list(range(1, STEPS_TO_RUN + 1))
    assert sorted(r.rollout_id for r in rows) == sorted(x["rollout_id"] for m in manifests for x in m.samples)
    for r in rows:
        origin = scored[r.rollout_id]
        assert (r.token_ids, r.rollout_logprobs, r.version_spans, r.ref_logprobs) == (
            origin.token_ids, origin.rollout_logprobs, origin.version_spans, origin.ref_logprobs)
        assert r.step - 1 - origin.policy_version_min <= 2


def logprobs_by_version(weights: dict[int, torch.nn.Module], row: Rollout) -> list[float]:
    """Each response token under the version that computed it, on the KV cache the earlier versions left: one token at a time."""
    out, cache = [], None
    ids = torch.tensor([row.token_ids])
    starts = [x["start"] for x in row.version_spans]
    for i in range(row.prompt_length, len(row.token_ids)):
        version = max((x for x in row.version_spans if x["start"] <= i), key=lambda x: x["start"])["policy_version"]
        new = ids[:, :i] if cache is None else ids[:, i - 1:i]
        with torch.no_grad():
            made = weights[version](new, past_key_values=cache, use_cache=True)
        cache = made.past_key_values
        out.append(torch.log_softmax(made.logits[0, -1].float(), -1)[row.token_ids[i]].item())
    assert starts[0] == row.prompt_length
    return out


def test_every_token_carries_the_version_that_computed_it(run, model):
    """Through the Flink job, token by token against transformers: before a switch the old weights, after it the new ones on the old cache."""
    s, _ = run
    policies = {}
    for w in records(s, WEIGHTS, Weights):
        policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        policy.load_state_dict(load_file(w.uri))
        policies[w.version] = policy
    # An evaluation may span versions too, but it carries no log-probabilities.
    rows = [r for r in records(s, SCORED, Rollout) if len(r.version_spans) > 1 and not is_evaluation(r.group_id)]
    several = sorted(rows, key=lambda r: -len(r.version_spans))[:12]
    assert len(several) == 12 and all(r.kv_policy == "reuse_partial" for r in several)
    worst = other = 0.0
    for row in several:
        right = logprobs_by_version(policies, row)
        said = row.rollout_logprobs[row.prompt_length:]
        worst = max(worst, *(abs(a - b) for a, b in zip(right, said, strict=True)))
        first = row.version_spans[0]["policy_version"]
        wrong = logprobs_by_version(dict.fromkeys(policies, policies[first]), row)
        other = max(other, *(abs(a - b) for a, b in zip(wrong, said, strict=True)))
    assert worst <= 1e-4
    assert other > 1e-3, "with the first version's weights throughout the numbers are others: the test can tell"


def test_reference_logprobs_are_the_start_models(run, model):
    s, _ = run
    start = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for row in [r for r in records(s, SCORED, Rollout) if r.ref_logprobs][:8]:
        with torch.no_grad():
            logits = start(torch.tensor([row.token_ids]), use_cache=False).logits[0].float()
        right = torch.log_softmax(logits[:-1], -1).gather(-1, torch.tensor(row.token_ids[1:])[:, None])[:, 0].tolist()
        for i in range(row.prompt_length, len(row.token_ids)):
            assert row.ref_logprobs[i] == pytest.approx(right[i - 1], abs=1e-4)
        assert row.ref_logprobs[:row.prompt_length] == [None] * row.prompt_length


def test_replay_counts_are_the_topics(run, tmp_path):
    s, made = run
    infos = {t.name: t for t in topics(s.kafka, s.run.id)}
    name = topic(s.run.id, SCORED)
    rows = replay(s.kafka, name, tmp_path / "scored.parquet")
    assert rows == pq.read_table(tmp_path / "scored.parquet").num_rows == made["rollouts"]
    assert infos[name].records == sum(1 for _ in read(s.kafka, name)) <= rows, "topics counts messages"
    assert replay(s.kafka, topic(s.run.id, STEPS), tmp_path / "steps.parquet") == STEPS_TO_RUN + 1


def test_the_run_is_in_mlflow_with_its_model(run):
    from operators.tracking import client

    s, made = run
    mlflow = client(s)
    tracked = mlflow.get_run(made["mlflow_run_id"])
    assert tracked.data.params["training.max_lag"] == "2"
    assert len(mlflow.get_metric_history(made["mlflow_run_id"], "reward")) == STEPS_TO_RUN
    assert {a.path for a in mlflow.list_artifacts(made["mlflow_run_id"])} >= {"settings.json", "summary.json", "learning.png", "model"}
    versions = [v for v in mlflow.search_model_versions(f"name='{s.mlflow.experiment}'") if v.tags["run_id"] == s.run.id]
    assert [v.tags["policy_version"] for v in versions] == [str(STEPS_TO_RUN)]


def test_the_final_model_is_the_last_version(run):
    s, _ = run
    marker = json.loads((s.run_dir / "model" / "pipelinerl.json").read_text())
    last = records(s, WEIGHTS, Weights)[-1]
    assert (marker["version"], marker["digest"]) == (STEPS_TO_RUN, last.digest)
    exported = AutoModelForCausalLM.from_pretrained(s.run_dir / "model", dtype=torch.float32).state_dict()
    for name, tensor in load_file(last.uri).items():
        assert torch.equal(exported[name], tensor), name


def test_nobody_waits_when_the_run_has_ended(run):
    s, _ = run
    assert waits_of(s) == []
    assert waits_of(s.model_copy(update={"run": s.run.model_copy(update={"id": "never-begun"})})) is None


def test_a_job_that_begins_again_reads_no_rollouts_of_resolved_groups(run):
    s, _ = run
    admitted = [a for a in records(s, ADMISSIONS, Admission) if a.kind == "group"]
    since = unresolved_since(s.kafka, s.run.id)
    assert admitted[-1].admitted_at - CLOCKS <= since <= records(s, ADMISSIONS, Admission)[-1].admitted_at, "nothing is open any more"
    for m in read(s.kafka, topic(s.run.id, ROLLOUTS)):
        for r in rows_of(Rollout, [m.value]):
            assert m.timestamp_ms / 1000 >= r.finished_at.timestamp() - 0.005, "where to begin is found by the time of writing"
    ensure_topics(s.kafka, "nothing")
    assert unresolved_since(s.kafka, "nothing") is None


def test_killed_workers_lose_nothing_and_train_nothing_twice(stack, model, run):
    """kill -9 of the generate job's worker and of a rank, in the middle; then the log alone makes the same weights again.

    The first run sends deltas through shared memory, the second one full versions through files: both end in the same bytes.
    """
    s = settings(stack, model, "killed", **{"run.max_steps": 16, "training.checkpoint_every": 4,
                                            "weights.encoding": "delta", "weights.full_every": 6, "weights.transport": "shared_memory"})
    killed: list[str] = []

    def kill() -> None:
        def trained() -> int:
            return max((x.step for x in records(s, STEPS, Step)), default=-1)

        until("topics", lambda: begun(s), 200)
        until("step 3", lambda: trained() >= 3, 200)
        FIND["generate worker"](stack)[0].send_signal(signal.SIGKILL)
        killed.append(f"engine's worker at step {trained()}")
        until("step 7", lambda: trained() >= 7, 200)
        max(FIND["rank"](stack), key=lambda p: p.name()).send_signal(signal.SIGKILL)
        killed.append(f"a rank at step {trained()}")

    ensure_topics(s.kafka, s.run.id)
    killer = threading.Thread(target=kill)
    killer.start()
    made = Run(s).go(lambda s: load_prompts(s, "demo", size=1000, seed=1))
    killer.join()
    assert len(killed) == 2, killed
    accounts = account_topics(s.kafka, s.run.id)
    assert accounts.adds_up, accounts.wrong
    spent = [(x["group_id"], x["sample_index"]) for m in records(s, BATCHES, Manifest) for x in m.samples]
    assert len(spent) == len(set(spent)), "no sample is trained twice"
    assert made["steps"] == 16 and made["samples_trained"] == len(spent)
    assert len({group for group, _ in spent}) == 16 * 8, "a step has eight groups, though a sample may have grown stale while a worker was away"
    digests = {}
    for w in records(s, WEIGHTS, Weights):
        assert w.epoch == 0 and digests.setdefault(w.version, w.digest) == w.digest, "a version made again is the same"
    sent = records(s, WEIGHTS, Weights)
    assert {w.version for w in sent if w.encoding == "full"} >= {0, 6, 12} and any(w.encoding == "delta" for w in sent)
    assert not made["weight_updates_failed"]

    again = settings(stack, model, "again", **{"run.max_steps": 16, "training.checkpoint_every": 100})
    ensure_topics(again.kafka, again.run.id)
    copy = producer(again.kafka)
    for m in read(s.kafka, topic(s.run.id, BATCHES)):
        copy.send(topic(again.run.id, BATCHES), value=m.value)
    copy.flush()
    job = flink.submit("train", again)
    try:
        until("the end of training", lambda: (again.run_dir / "model" / "pipelinerl.json").exists(), 200)
    finally:
        flink.cancel(job, again)
    assert {w.version: w.digest for w in records(again, WEIGHTS, Weights)} == digests, "the undisturbed run makes the same weights"


def test_the_end_of_the_prompts_ends_the_run(stack, model, run):
    """Case 41: the last prompts make less than a step."""
    s = settings(stack, model, "tail", **{"training.ranks": 1, "reference.enabled": "false", "training.kl_coef": 0, "grouping.zero_variance": "train"})
    made = Run(s).go(lambda s: load_prompts(s, "demo", size=20))  # 80 samples, steps of 32
    assert made["steps"] == 2
    assert made["accounting"] | {"duplicates": 0} == {"admitted": 80, "trained": 64, "evaluated": 0, "end_of_run": 16, "stale_dropped": 0, "filtered": 0,
                                                      "late": 0, "aborted": 0, "dead": 0, "buffered": 0, "in_flight": 0, "duplicates": 0}


def test_the_conventional_mode_takes_turns(stack, model, run):
    """The baseline: rounds of G = max_lag + 1 steps, all of a round's samples under the version it began with."""
    s = settings(stack, model, "turns", **{"run.mode": "conventional", "run.max_steps": 4, "training.max_lag": 1, "training.ranks": 1})
    summary = Run(s).go(lambda s: load_prompts(s, "demo", size=400))
    assert summary["steps"] == 4 and summary["accounting_adds_up"] and summary["accounting"]["stale_dropped"] == 0
    assert summary["rollouts_spanning_versions"] == summary["updates_seen_inside_a_sequence"] == 0
    version = {(r.group_id, r.sample_index): r.policy_version_min for r in records(s, SCORED, Rollout)}
    trained = [m for m in records(s, BATCHES, Manifest) if m.kind == "step"]
    assert [{version[x["group_id"], x["sample_index"]] for x in m.samples} for m in trained] == [{0}, {0}, {2}, {2}]
    assert [m.lag_max for m in trained] == [0, 1, 0, 1]


def test_a_stop_ends_the_run(stack, model, run):
    s = settings(stack, model, "stopped", **{"training.ranks": 1, "reference.enabled": "false", "training.kl_coef": 0})

    def stop() -> None:
        until("step 2", lambda: begun(s) and any(x.step >= 2 for x in records(s, STEPS, Step)), 200)
        say(s, "stop", "a test asks for it")

    ensure_topics(s.kafka, s.run.id)
    thread = threading.Thread(target=stop)
    thread.start()
    made = Run(s).go(lambda s: load_prompts(s, "demo", size=5000), end_of_prompts=False)
    thread.join()
    assert made["steps"] >= 2 and made["accounting_adds_up"]
    assert made["accounting"]["end_of_run"] > 0


def test_a_run_that_was_killed_is_resumed(stack, model, run):
    """kill -9 of the command: its jobs are left on the cluster; the next command takes the run up from its logs alone."""
    s = settings(stack, model, "resumed", **{"run.max_steps": 10, "training.ranks": 1, "training.checkpoint_every": 3})
    ensure_topics(s.kafka, s.run.id)
    toml = s.run_dir.parent / "resumed.json"
    toml.write_text(s.model_dump_json())
    code = ("import sys; from pathlib import Path; from jobs.run import Run; from jobs.prompts import load_prompts; from schemas.settings import Settings; "
            "Run(Settings.model_validate_json(Path(sys.argv[1]).read_text())).go(lambda s: load_prompts(s, 'demo', size=1000, seed=2))")
    first = subprocess.Popen([sys.executable, "-c", code, str(toml)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until("step 4", lambda: begun(s) and any(x.step >= 4 for x in records(s, STEPS, Step)), 200)
    finally:
        first.kill()
        first.wait()
    made = Run(s).go(lambda s: load_prompts(s, "demo", size=1000, seed=2))
    assert made["accounting_adds_up"], account_topics(s.kafka, s.run.id).wrong
    spent = [(x["group_id"], x["sample_index"]) for m in records(s, BATCHES, Manifest) for x in m.samples]
    assert made["steps"] == 10 and made["samples_trained"] == len(spent) == len(set(spent))
    assert len({group for group, _ in spent}) == 10 * 8, "a step has eight groups, though a sample may have grown stale meanwhile"
    steps = [x.step for x in records(s, STEPS, Step)]
    assert sorted(set(steps)) == list(range(11))


def test_a_job_that_fails_for_good_fails_the_run_with_its_cause(stack, tmp_path, model, run):
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    s = settings(stack, broken, "broken", **{"flink.restart_attempts": 1, "training.ranks": 1, "reference.enabled": "false",
                                             "training.kl_coef": 0, "run.max_steps": 1})
    with pytest.raises(RunFailed, match=r"job (train|generate) is FAILED"):
        Run(s).go(lambda s: load_prompts(s, "demo", size=50))
