"""What a run leaves behind: summary.json, learning.png, and in MLflow the settings, the picture and the model."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from jobs.progress import Progress
from operators.accounting import Accounts
from operators.evaluation import Figures
from schemas.settings import Settings


@dataclass
class Spans:
    """What the rollouts tell of updates that landed inside them."""

    rollouts: int = 0
    spanning: int = 0
    tokens: int = 0
    seen_inside: set[int] = field(default_factory=set)  # versions that begin inside a sequence


def spans_of(messages: Iterable[bytes]) -> Spans:
    """From messages of `scored`; reads only the columns it needs."""
    out = Spans()
    for message in messages:
        try:
            table = pa.ipc.open_stream(message).read_all().select(["version_spans", "token_ids", "prompt_length"])
        except (pa.ArrowException, KeyError, OSError):
            continue  # no rollout
        columns = table.column(0), pc.list_value_length(table.column(1)), table.column(2)
        for spans, tokens, prompt in zip(*(c.to_pylist() for c in columns), strict=True):
            out.rollouts += 1
            out.tokens += tokens - prompt
            if len(spans) > 1:
                out.spanning += 1
                out.seen_inside.update(s["policy_version"] for s in spans[1:])
    return out


def summary(progress: Progress, accounts: Accounts, spans: Spans, wall_s: float, mlflow_run_id: str | None) -> dict:
    """The figures of summary.json; rewards are means over the first and last tenth of the steps."""
    history = [progress.history[s] for s in sorted(progress.history)]
    tenth = max(1, len(history) // 10)

    def mean(rows: list[dict], name: str) -> float | None:
        values = [r[name] for r in rows if name in r]
        return sum(values) / len(values) if values else None

    applied = {(e, v) for _, e, v in progress.applied if v > 0}
    return {
        "steps": progress.step,
        "samples_trained": accounts.outcomes["trained"],
        "reward_first": mean(history[:tenth], "reward"),
        "reward_last": mean(history[-tenth:], "reward"),
        "lag_mean": mean(history, "lag/mean"),
        "lag_max": max((r["lag/max"] for r in history if "lag/max" in r), default=None),
        "ess_min": min((r["ess/raw"] for r in history if "ess/raw" in r), default=None),
        "rollouts": spans.rollouts,
        "rollouts_spanning_versions": spans.spanning,
        "updates_seen_inside_a_sequence": len(spans.seen_inside & {v for _, v in applied}),
        "weight_updates_applied": len(applied),
        "weight_updates_failed": len(progress.failed),
        "tokens_generated": spans.tokens,
        "evaluations": [_round(v, f) for v, f in sorted(progress.curve.rounds.items())],
        "accounting": accounts.summary(),
        "accounting_adds_up": accounts.adds_up,
        "wall_s": round(wall_s, 1),
        "mlflow_run_id": mlflow_run_id,
    }


def _round(version: int, f: Figures) -> dict:
    """With text keys, as in the file."""
    return {"version": version, **asdict(f), "pass_at": {str(k): p for k, p in f.pass_at.items()}}


def plot(progress: Progress, path: Path, title: str) -> None:
    """Reward, lag, effective sample size and speed over the steps, then lag and weights by position in the response, one panel each."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = sorted(progress.history)
    panels = [
        ("reward", [("reward", "all graded samples")]),
        ("token lag [steps]", [("lag/mean", "mean"), ("lag/p95", "95 %"), ("lag/max", "max")]),
        ("effective sample size", [("ess/raw", "before the clip"), ("ess/clipped", "after the clip")]),
        ("tokens/s", [("generation/tokens_per_s", "generated"), ("train/tokens_per_s", "trained, while training")]),
    ]
    figure, axes = plt.subplots(3, 2, figsize=(11, 10), constrained_layout=True)

    def finish(axis, xlabel: str, ylabel: str) -> None:
        axis.set_xlabel(xlabel)
        axis.set_ylabel(ylabel)
        axis.grid(alpha=0.3)
        if axis.lines:
            axis.legend(fontsize=8)

    for axis, (label, lines) in zip(axes.flat[:len(panels)], panels, strict=True):
        for name, legend in lines:
            points = [(s, progress.history[s][name]) for s in steps if name in progress.history[s]]
            if not points:
                continue
            x, y = zip(*points, strict=True)
            axis.plot(x, y, linewidth=0.8, alpha=0.5 if label == "reward" else 1.0, label=legend)
            if label == "reward":
                window = max(1, len(y) // 20)
                smooth = [sum(y[max(0, i - window):i + 1]) / len(y[max(0, i - window):i + 1]) for i in range(len(y))]
                axis.plot(x, smooth, linewidth=2, label=f"mean of {window} steps")
        if label == "reward" and (rounds := sorted(progress.curve.rounds.items())):
            axis.errorbar([v for v, _ in rounds], [f.reward for _, f in rounds], [f.reward_error for _, f in rounds], color="black",
                          marker="o", markersize=4, linewidth=1, capsize=2, label="held-out prompts")
        finish(axis, "optimizer step", label)
    half = [progress.history[s] for s in steps[len(steps) // 2:]]
    by_position = [("token lag [steps]", [("lag", "mean")]),
                   ("importance weight", [("is_ratio", "mean weight"), ("ess", "effective sample size")])]
    for axis, (label, lines) in zip(axes.flat[len(panels):], by_position, strict=True):
        for family, legend in lines:
            found = {int(name.rsplit("_", 1)[1]) for row in half for name in row if name.startswith(f"{family}/at_")}
            y = {p: [row[f"{family}/at_{p}"] for row in half if f"{family}/at_{p}" in row] for p in sorted(found)}
            axis.plot([p + 1 for p in y], [sum(v) / len(v) for v in y.values()], marker="o", markersize=3, label=legend)
        axis.set_xscale("log", base=2)
        finish(axis, "first of the response positions, from 1 (second half of the steps)", label)
    figure.suptitle(title)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def to_mlflow(settings: Settings, folder: Path) -> str | None:
    """Attach settings, summary, picture and model to the run and register the model. Returns the MLflow run's id; raises
    MlflowException or OSError if the server is away."""
    from operators.tracking import client, find_or_create_run

    mlflow = client(settings)
    run_id = find_or_create_run(mlflow, settings)
    for name in ("settings.json", "summary.json", "learning.png"):
        if (folder / name).exists():
            mlflow.log_artifact(run_id, str(folder / name))
    marker = folder / "model" / "pipelinerl.json"
    if marker.exists():
        mlflow.log_artifacts(run_id, str(folder / "model"), "model")
        if settings.mlflow.register_model:
            _register(mlflow, settings, run_id, json.loads(marker.read_text()))
    mlflow.set_terminated(run_id)
    return run_id


def _register(mlflow, settings: Settings, run_id: str, made: dict) -> None:
    from mlflow.exceptions import MlflowException

    name = settings.mlflow.experiment
    try:
        mlflow.create_registered_model(name)
    except MlflowException as e:
        if e.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = f"{mlflow.get_run(run_id).info.artifact_uri}/model"
    tags = {"policy_version": str(made["version"]), "digest": made["digest"], "run_id": settings.run.id}
    mlflow.create_model_version(name, source, run_id, tags=tags)
