"""What a run shows of itself while it goes on: fed with records of `steps`, `weights.acks`, `batches` and `dead`, drawn by rich."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from operators.evaluation import Curve
from schemas.records import Ack, Dead, Evaluation, Manifest, Step


@dataclass
class Progress:
    """The state of a run as its topics tell it. Knows neither Kafka nor a terminal."""

    max_steps: int | None = None
    step: int = 0
    formed: int = 0
    ended: bool = False  # the end manifest is there: no further step is formed
    epoch: int = 0
    version: int | None = None  # newest on offer
    started: float = field(default_factory=time.monotonic)
    last_event: float = field(default_factory=time.monotonic)
    history: dict[int, dict[str, float]] = field(default_factory=dict)  # by step
    acks: dict[str, Ack] = field(default_factory=dict)  # newest of each generator
    applied: set[tuple[str, int, int]] = field(default_factory=set)  # (generator, epoch, version)
    failed: list[Ack] = field(default_factory=list)
    dead: list[Dead] = field(default_factory=list)
    curve: Curve = field(default_factory=lambda: Curve(1.0))  # of held-out prompts

    def feed(self, record: Step | Ack | Manifest | Dead | Evaluation) -> None:
        self.last_event = time.monotonic()
        if isinstance(record, Step):
            self.epoch, self.version = record.epoch, record.version_out
            if record.step > 0:
                self.step = max(self.step, record.step)
                self.history[record.step] = dict(record.metrics)
        elif isinstance(record, Ack):
            self.acks[record.generator_id] = record
            if record.status == "applied":
                self.applied.add((record.generator_id, record.epoch, record.version))
            else:
                self.failed.append(record)
        elif isinstance(record, Manifest):
            if record.kind == "end":
                self.ended = True
            else:
                self.formed = max(self.formed, record.step)
        elif isinstance(record, Evaluation):
            self.curve.feed([record])
        else:
            self.dead.append(record)

    @property
    def finished(self) -> bool:
        return self.ended and self.step >= self.formed

    def waits_for(self) -> str:
        """What has to happen next, for a person who wonders."""
        if self.version is None:
            return "the trainer's first version"
        if not self.acks:
            return f"an engine that holds version {self.version}"
        if not self.formed:
            return "the first full step of graded groups"
        if self.step < self.formed:
            return f"the trainer's step {self.step + 1}"
        return "the end manifest" if self.step == self.max_steps else f"the groups of step {self.formed + 1}"

    def row(self) -> dict[str, str]:
        """The figures a person follows, named."""
        m = self.history.get(self.step, {})
        recent = [self.history[s].get("reward") for s in sorted(self.history)[-10:]]
        recent = [r for r in recent if r is not None]
        held = sorted({a.version for a in self.acks.values()})
        of = f"/{self.max_steps}" if self.max_steps else ""
        rounds = self.curve.rounds
        held_out = {"held out": f"{rounds[max(rounds)].reward:.3f} (version {max(rounds)})"} if rounds else {}
        return {
            "step": f"{self.step}{of}",
            "reward": f"{sum(recent) / len(recent):.3f}" if recent else "-",
            **held_out,
            "lag": f"{m['lag/mean']:.2f} (max {m['lag/max']:.0f})" if "lag/mean" in m else "-",
            "ESS": f"{m['ess/raw']:.3f}" if "ess/raw" in m else "-",
            "generated": f"{m['generation/tokens_per_s']:.0f} tok/s" if "generation/tokens_per_s" in m else "-",
            "trained": f"{m['train/tokens_per_s']:.0f} tok/s" if "train/tokens_per_s" in m else "-",
            "in flight": str(sum(a.in_flight for a in self.acks.values())),
            "applied": ", ".join(map(str, held)) or "-",
            "dead": str(len(self.dead)),
            "time": f"{time.monotonic() - self.started:.0f} s",
        }


class Display:
    """Live on a terminal; a line every few seconds elsewhere."""

    LINE_S = 10.0

    def __init__(self, progress: Progress):
        from rich.console import Console
        from rich.live import Live

        self.progress, self.console = progress, Console()
        self._live = Live(console=self.console, refresh_per_second=2, transient=True) if self.console.is_terminal else None
        self._last_line = 0.0

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def draw(self) -> None:
        if self._live:
            self._live.update(self._table())
        elif time.monotonic() - self._last_line >= self.LINE_S:
            self._last_line = time.monotonic()
            waits = "" if self.progress.step else f"  (waiting for {self.progress.waits_for()})"
            self.say("  ".join(f"{k} {v}" for k, v in self.progress.row().items()) + waits)

    def _table(self):
        from rich.table import Table

        row = self.progress.row()
        table = Table(title=None if self.progress.step else f"waiting for {self.progress.waits_for()}")
        for name in row:
            table.add_column(name, justify="right", no_wrap=True)
        table.add_row(*row.values())
        return table
