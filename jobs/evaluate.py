"""`pipelinerl eval MODEL --prompts SOURCE`: what a model folder answers to held-out prompts, graded like rollouts in training.

Promises: prompts are rendered, sampled and graded by the very classes of the pipeline; an answer that nobody could grade, or a prompt
that the model cannot take, counts as wrong and is counted besides; the rollouts can be kept as a file with the columns of `scored`.
Needs neither Kafka nor Flink.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa

from operators.evaluation import Figures, figures
from operators.rollouts import Rollouts, label, tokenizer_digest
from schemas.record import encode, read
from schemas.records import Dispatch, Prompt, Rollout, now
from schemas.settings import BadSettings, Settings


@dataclass(frozen=True)
class Score(Figures):
    """What came out."""

    temperature: float  # 0: greedy
    truncated: float  # share of the samples that reached max_tokens
    tokens: int
    seconds: float
    policy_version: int | None  # of a model that a run made


def evaluate(settings: Settings, prompts: Sequence[Prompt], *, samples: int = 1, greedy: bool = False, right: float = 1.0,
             to: Path | None = None, say=print) -> Score:
    """Sample and grade; `settings.model.path` is the model. Raises BadSettings for a combination that makes no sense."""
    if samples < 1:
        raise BadSettings(f"--samples {samples}: at least one")
    if greedy and samples > 1:
        raise BadSettings(f"--greedy with --samples {samples}: greedy answers are all the same, one is enough")
    if to is not None and to.suffix != ".parquet":
        raise BadSettings(f"--to {to}: a .parquet file")
    from operators.generation import engine_env
    from operators.loader import WeightFiles
    from operators.reward import RewardService

    WeightFiles(settings.model.path, settings.generation.dtype)  # a folder that is no model's is said at once
    os.environ.update(engine_env(settings, 0))
    from operators.vllm_engine import VLLMEngine  # importing vLLM takes seconds

    g = settings.generation.model_copy(update={"spare_weights": False})  # they never change here
    engine = VLLMEngine(g, settings.model, seed=settings.run.seed)
    made = _made_by(Path(settings.model.path))
    name = label(0, made.get("version", 0))
    engine.set_label(name)
    rollouts = Rollouts(g, run_id="eval", generator_id="eval", engine=engine.name, tokenizer=engine.tokenizer,
                        tokenizer_digest=tokenizer_digest(settings.model.path), stop_ids=engine.stop_ids)
    digests = {name: made.get("digest", "")}
    service = RewardService(settings.reward, lambda cause, *_: say(f"not graded: {cause}"))
    began = time.monotonic()
    with contextlib.closing(service):
        tables = _sample_and_grade(engine, rollouts, service, prompts, samples, greedy, g.batch, digests, say)
    rewards: list[list[float | None]] = [[None] * samples for _ in prompts]
    truncated = tokens = 0
    for (prompt, sample), t in tables.items():
        rewards[prompt][sample] = t.column("reward")[0].as_py()
        truncated += t.column("truncated")[0].as_py()
        tokens += len(t.column("token_ids")[0]) - t.column("prompt_length")[0].as_py()
    if to is not None:
        _keep([tables[key] for key in sorted(tables)], to)
    return Score(**vars(figures(rewards, right)), temperature=0.0 if greedy else g.temperature, truncated=truncated / len(tables),
                 tokens=tokens, seconds=time.monotonic() - began, policy_version=made.get("version"))


def _sample_and_grade(engine, rollouts: Rollouts, service, prompts: Sequence[Prompt], samples: int, greedy: bool, capacity: int,
                      digests: dict[str, str], say) -> dict[tuple[int, int], pa.Table]:
    """(prompt, sample) -> the graded rollout. `capacity` are in the engine at once; a slot that frees is taken before the next step."""
    waiting = collections.deque((p, s) for p in range(len(prompts)) for s in range(samples))
    in_flight, out, total = {}, {}, len(waiting)
    (digest,) = digests.values()
    told = time.monotonic()
    while len(out) < total:
        while waiting and len(in_flight) < capacity:
            p, s = waiting.popleft()
            ident = f"{p}-{s}"
            request = rollouts.request(ident, 0, encode([Dispatch(
                admission=p, group_id=prompts[p].group_id, sample_index=s, group_size=samples, attempt=0, min_version=0, policy_version=0,
                prompt=encode([prompts[p]]), dispatched_at=now(), greedy=greedy or None)]))
            if request.refusal is None:
                try:
                    engine.add(ident, request.prompt_ids, request.max_tokens, None, greedy)
                except ValueError as e:
                    request.refusal = "error", f"the engine does not take the prompt: {e}"
            if request.refusal is not None:
                say(f"prompt {prompts[p].prompt_id}: {request.refusal[1]}")
                service.submit(ident, encode([rollouts.refused(request, digest)]))
                continue
            in_flight[ident] = request
        for sampled in engine.step() if in_flight else ():
            service.submit(sampled.ident, encode([rollouts.finished(in_flight.pop(sampled.ident), sampled, None, digests, digest)]))
        for ident, messages in service.drain():
            for message in messages:
                p, s = map(int, ident.split("-"))
                out[p, s] = read(Rollout, message)
        if not in_flight and not waiting:
            time.sleep(0.005)  # only graders are at work
        if time.monotonic() - told > 10:
            told = time.monotonic()
            say(f"{len(out)} of {total} samples graded")
    return out


def _made_by(folder: Path) -> dict:
    """What a run's final model says of itself: version, digest."""
    try:
        return json.loads((folder / "pipelinerl.json").read_text())
    except FileNotFoundError:
        return {}


def _keep(tables: list[pa.Table], to: Path) -> None:
    import pyarrow.parquet as pq

    to.parent.mkdir(parents=True, exist_ok=True)
    part = to.with_name(to.name + ".part")
    pq.write_table(pa.concat_tables(tables).unify_dictionaries(), part)
    os.replace(part, to)


def report(s: Score) -> str:
    """For a person; the last line is JSON for a program."""
    how = "greedy" if s.temperature == 0 else f"{s.samples} sample(s) a prompt at temperature {s.temperature:g}"
    lines = [f"{s.prompts} prompts, {how}" + (f"; policy version {s.policy_version}" if s.policy_version is not None else ""),
             f"  reward   {s.reward:.4f} ± {s.reward_error:.4f}",
             *(f"  pass@{k:<4}{p:.4f}" + (f" ± {s.pass_at_1_error:.4f}" if k == 1 else "") for k, p in s.pass_at.items()),
             f"  {s.truncated:.1%} reached max_tokens; {s.ungraded} could not be graded and count as wrong",
             f"  {s.tokens} tokens in {s.seconds:.1f} s", json.dumps(asdict(s))]
    return "\n".join(lines)
