"""What rank 0 writes: versions on offer, steps and the outcome `trained`. The logs are its memory.

Promises: a step's weights event, its record and the outcomes of its samples become visible together or not at all, after the bytes of
the weights are complete and before a checkpoint counts; a step that is run again with the same result writes nothing, and the bytes on
offer stay as they are while anybody may be reading them; one with another result begins a new epoch and says no outcome twice.
Needs no torch.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterable, Iterator
from typing import Protocol

from operators.checkpoint import BadCheckpoint
from operators.log import Message
from schemas.record import encode, rows_of
from schemas.records import Manifest, Outcome, Weights, now
from schemas.records import Step as StepRecord
from schemas.settings import Settings
from schemas.topics import OUTCOMES, STEPS, WEIGHTS, topic

log = logging.getLogger(__name__)


class Log(Protocol):
    """What is used of `operators.log.OwnedLog`."""

    def read(self, name: str) -> Iterable[Message]: ...

    def append(self, records: Iterable[tuple[str, bytes | None, bytes]]) -> None: ...


class Bytes(Protocol):
    """What is used of `operators.weights.Staged`."""

    digest: str

    def offer(self, epoch: int, version: int, run_id: str) -> Weights: ...

    def discard(self) -> None: ...

    def is_there(self, event: Weights) -> bool: ...


class Publication:
    """The newest offered line of versions and the steps on record, read from the logs when it opens.

    `line[v]` is the event of version v that holds now: an event of a new epoch ends the line of the old one at its version.
    """

    def __init__(self, settings: Settings, log: Log):
        self.settings, self._log = settings, log
        run = settings.run.id
        self._topics = {name: topic(run, name) for name in (WEIGHTS, STEPS, OUTCOMES)}
        self.line: dict[int, Weights] = {}
        self.epoch = 0
        for event in rows_of(Weights, (m.value for m in log.read(self._topics[WEIGHTS]))):
            self._adopt(event)
        self.recorded: dict[int, str] = {}  # step -> digest of the version it made
        for step in rows_of(StepRecord, (m.value for m in log.read(self._topics[STEPS]))):
            self.recorded[step.step] = step.weights_digest
        self.current: Weights | None = None

    def start(self, version: int, staged: Bytes, checkpoint_digest: str | None) -> Weights:
        """Offer the version the trainer starts with: 0, or its checkpoint's. Raises BadCheckpoint if that is none of this log."""
        if checkpoint_digest is not None and self.recorded.get(version) != checkpoint_digest:
            raise BadCheckpoint(
                f"the checkpoint of step {version} in {self.settings.run_dir / 'checkpoints'} is not of the run that {self._topics[STEPS]} "
                f"records (newest step there: {max(self.recorded, default='none')}): take another run.id, or remove the folder")
        return self._write(version, staged, {}, None, None)

    def trained(self, manifest: Manifest, staged: Bytes, metrics: dict[str, float], checkpoint_uri: str | None) -> Weights:
        """Put on record what the manifest's step made."""
        return self._write(manifest.step, staged, metrics, manifest, checkpoint_uri)

    def keep(self, checkpoints: Iterable[int]) -> set[int]:
        """The versions whose bytes are still needed: the newest ones on offer, those overtaken a moment ago, the current one, those of
        checkpoints, and their bases."""
        w, versions, at = self.settings.weights, sorted(self.line, reverse=True), now()
        needed = {*versions[:w.keep], *checkpoints, *([self.current.version] if self.current else ())}
        for newer, version in itertools.pairwise(versions):
            if (at - self.line[newer].offered_at).total_seconds() > w.keep_s:
                break
            needed.add(version)
        return needed.union(*({event.version for event in self._chain(version)} for version in needed))

    def _chain(self, version: int | None) -> Iterator[Weights]:
        """The event of a version, that of its base, and so on to a full one."""
        while version is not None and (event := self.line.get(version)) is not None:
            yield event
            version = event.base_version

    def _stands(self, event: Weights, staged: Bytes) -> bool:
        """Whether an event on offer can be used: its bytes are there, and those of the bases that its delta names.

        Then no others are put in their place, be they of the same weights: a delta made again may name another event of its base, and
        who has heard the old event, or has a delta that names it, would find what he does not expect.
        """
        chain = list(self._chain(event.version))
        return chain[-1].base_version is None and all(staged.is_there(e) for e in chain) and all(
            base.offered_at <= e.offered_at for e, base in itertools.pairwise(chain))  # else the base was said again since

    def _write(self, version: int, staged: Bytes, metrics: dict[str, float], manifest: Manifest | None,
               checkpoint_uri: str | None) -> Weights:
        run = self.settings.run.id
        held = self.line.get(version)
        if held is not None and held.digest != staged.digest:
            self.epoch += 1
            log.warning(f"version {version} was made again with other bytes ({held.digest[:12]} -> {staged.digest[:12]}): "
                  f"epoch {self.epoch} begins")
            held = None
        if held is not None and self._stands(held, staged):
            staged.discard()
            event, records = held, []
        else:
            event = staged.offer(held.epoch if held else self.epoch, version, run)
            self._adopt(event)
            records = [(self._topics[WEIGHTS], None, encode([event]))]
        if self.recorded.get(version) != event.digest:
            measured = metrics | {"weights/bytes": event.bytes}
            records.append((self._topics[STEPS], None, encode([StepRecord(
                run_id=run, epoch=event.epoch, step=version, version_in=version - 1 if manifest else None, version_out=version,
                weights_digest=event.digest, metrics=list(measured.items()), checkpoint_uri=checkpoint_uri, finished_at=now())])))
        if manifest is not None and manifest.samples and version not in self.recorded:
            at = now()
            records.append((self._topics[OUTCOMES], None, encode([
                Outcome(run_id=run, outcome="trained", step=version, decided_at=at, **sample) for sample in manifest.samples])))
        self._log.append(records)
        self.recorded[version] = event.digest
        self.current = event
        return event

    def _adopt(self, event: Weights) -> None:
        if event.epoch > self.epoch:
            self.epoch = event.epoch
        for version in [v for v, held in self.line.items() if v >= event.version and held.epoch < event.epoch]:
            del self.line[version]
        self.line[event.version] = event
