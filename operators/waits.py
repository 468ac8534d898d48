"""Who waits for what, since when, and how long at most: told from the topics alone, for a person who wonders why nothing moves.

Promises (invariant 9): every wait of a run has an owner and, where somebody acts at its end, the limit with the setting that gives it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from operators.accounting import unresolved
from operators.evaluation import is_evaluation
from operators.log import NoTopic, read
from schemas.record import rows_of
from schemas.records import Ack, Admission, Manifest, Outcome, Rollout, Step, Weights, now
from schemas.settings import Settings
from schemas.topics import ACKS, ADMISSIONS, BATCHES, OUTCOMES, ROLLOUTS, STEPS, WEIGHTS, topic


@dataclass(frozen=True)
class Wait:
    """`age_s` and `limit_s` in seconds; without a limit nobody acts: something else has to happen first, which has a limit of its own."""

    owner: str
    what: str
    age_s: float
    limit_s: float | None = None
    setting: str | None = None


def waits(settings: Settings, at: datetime, *, admissions: Iterable[Admission], outcomes: Iterable[Outcome], rollouts: Iterable[Rollout],
          manifests: Iterable[Manifest], steps: Iterable[Step], weights: Iterable[Weights], acks: Iterable[Ack]) -> list[Wait]:
    """All waits of a run at a moment, the owners in the order of the pipeline. Empty if the run has ended."""
    manifests, steps = list(manifests), {s.step: s for s in steps}
    formed = {m.step: m for m in manifests if m.kind == "step"}
    trained = max(steps, default=None)
    ended = any(m.kind == "end" for m in manifests) and (trained or 0) >= max(formed, default=0)
    if ended:
        return []
    admissions = list(admissions)
    open_groups = unresolved(admissions, outcomes)
    arrived: dict[str, dict[int, datetime]] = {}
    for r in rollouts:
        if r.group_id in open_groups:
            arrived.setdefault(r.group_id, {}).setdefault(r.sample_index, r.finished_at)
    in_steps = {s["group_id"] for m in formed.values() if trained is None or m.step > trained for s in m.samples}

    def age(since: datetime) -> float:
        return max(0.0, (at - since).total_seconds())

    return [*_admission(settings, open_groups, admissions, age), *_engines(settings, weights, acks, age),
            *_groups(settings, {g: v for g, v in open_groups.items() if g not in in_steps}, arrived, age),
            *_trainer(settings, formed, steps, trained, age)]


def _admission(settings: Settings, open_groups: dict, admissions: list[Admission], age) -> list[Wait]:
    if any(a.kind == "closed" for a in admissions):
        return []
    if not admissions:
        return [Wait("admission", "the first prompts, or the generate job", 0.0)]
    last, held = admissions[-1], sum(len(left) for g, (_, left) in open_groups.items() if not is_evaluation(g))
    if settings.credit - held < settings.grouping.group_size:
        return [Wait("admission", f"outcomes: {held} of {settings.credit} samples are unresolved", age(last.admitted_at))]
    return [Wait("admission", f"prompts: there is credit for {settings.credit - held} samples", age(last.admitted_at))]


def _engines(settings: Settings, weights: Iterable[Weights], acks: Iterable[Ack], age) -> list[Wait]:
    offered = {(w.epoch, w.version): w for w in weights}
    if not offered:
        return [Wait("engines", "the trainer's first version", 0.0)]
    newest = offered[max(offered)]
    held: dict[str, tuple[int, int]] = {}
    refused: dict[str, str] = {}
    for a in acks:
        if a.status == "applied":
            held[a.generator_id] = max(held.get(a.generator_id, (-1, -1)), (a.epoch, a.version))
            refused.pop(a.generator_id, None)
        else:
            refused[a.generator_id] = f"; it refused version {a.version}: {a.cause}"
    if not held:
        return [Wait("engines", f"version {newest.version} applied, the first they hold", age(newest.offered_at),
                     settings.generation.start_timeout_s, "generation.start_timeout_s")]
    late = {g: v for g, v in sorted(held.items()) if v < (newest.epoch, newest.version)}
    following = {g: min(k for k in offered if k > v) for g, v in late.items()}
    return [Wait(g, f"version {newest.version} applied (holds {v[1]}){refused.get(g, '')}", age(offered[following[g]].offered_at))
            for g, v in late.items()]


def _groups(settings: Settings, open_groups: dict, arrived: dict[str, dict[int, datetime]], age) -> list[Wait]:
    g = settings.grouping
    begun, unbegun, ready = [], [], []
    for group_id, (a, left) in open_groups.items():
        came = arrived.get(group_id, {})
        missing = left - came.keys()
        if not missing:
            ready.append((group_id, len(left), max(came.values())))
        elif came:
            begun.append(Wait("sequencer", f"samples {sorted(missing)} of group {group_id}, whose others have come",
                              age(min(came.values())), g.timeout_s, "grouping.timeout_s"))
        else:
            unbegun.append(a)
    out = sorted(begun, key=lambda w: -w.age_s)
    if unbegun:
        oldest = min(unbegun, key=lambda a: a.admitted_at)
        out.append(Wait("sequencer", f"the first rollout of {len(unbegun)} group(s), the oldest {oldest.group_id}", age(oldest.admitted_at),
                        g.sample_timeout_s, "grouping.sample_timeout_s"))
    if ready:
        count = sum(n for _, n, _ in ready)
        out.append(Wait("sequencer", f"a step: {count} samples of complete groups, a step takes {settings.training.batch}",
                        age(min(last for _, _, last in ready))))
    return out


def _trainer(settings: Settings, formed: dict[int, Manifest], steps: dict[int, Step], trained: int | None, age) -> list[Wait]:
    ahead = sorted(k for k in formed if trained is not None and k > trained)
    if not ahead:
        return []
    since = max(formed[ahead[0]].formed_at, steps[trained].finished_at)
    return [Wait("trainer", f"step {ahead[0]} to be trained; {len(ahead)} formed in all", age(since), settings.training.stall_timeout_s,
                 "training.stall_timeout_s")]


def waits_of(settings: Settings) -> list[Wait] | None:
    """Of the run in `settings`, from its topics; None if it has none. Raises operators.log.BrokerAway."""
    kafka, run = settings.kafka, settings.run.id

    def rows(cls, name: str):
        return list(rows_of(cls, (m.value for m in read(kafka, topic(run, name)))))

    # Outcomes first: what is resolved meanwhile then looks unresolved for a moment, never the other way round.
    try:
        return waits(settings, now(), outcomes=rows(Outcome, OUTCOMES), steps=rows(Step, STEPS), acks=rows(Ack, ACKS),
                     rollouts=rows(Rollout, ROLLOUTS), manifests=rows(Manifest, BATCHES), weights=rows(Weights, WEIGHTS),
                     admissions=rows(Admission, ADMISSIONS))
    except NoTopic:
        return None


SHOWN = 12


def table(found: list[Wait]) -> str:
    """A line a wait."""
    if not found:
        return "waits: none, the run has ended"
    lines = [f"{'owner':12}  {'for':>8}  {'limit':>8}  waits for"]
    for w in found[:SHOWN]:
        limit = "-" if w.limit_s is None else f"{w.limit_s:g} s"
        lines.append(f"{w.owner:12}  {w.age_s:6.1f} s  {limit:>8}  {w.what}" + (f" ({w.setting})" if w.setting else ""))
    if len(found) > SHOWN:
        lines.append(f"... and {len(found) - SHOWN} more")
    return "\n".join(lines)
