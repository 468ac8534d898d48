"""Checkpoints of the trainer: the only cursor of training.

Promises: a checkpoint counts only when all ranks have written it, which its marker says, written last; one whose bytes are not those
of its marker is skipped with a warning and the one before is used; all ranks choose the same. The marker can be read without torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
from pathlib import Path

MARKER = "complete.json"

log = logging.getLogger(__name__)


class BadCheckpoint(RuntimeError):
    """A checkpoint that cannot be resumed from; the text says why and what to do."""


@dataclasses.dataclass(frozen=True)
class Marker:
    """What a complete checkpoint is of."""

    run_id: str
    version: int  # optimizer steps taken; the next step is version + 1
    epoch: int
    digest: str  # of the weights in it, as they were published
    world: int  # ranks that wrote it
    files: dict[str, str]  # sha256 of each file


def tag(version: int) -> str:
    return f"step-{version:08d}"


def markers(folder: Path) -> list[tuple[Path, Marker]]:
    """The complete checkpoints, newest first. What is half written has no marker and is not among them."""
    found = []
    for path in sorted(folder.glob(f"step-*/{MARKER}"), reverse=True):
        try:
            found.append((path.parent, Marker(**json.loads(path.read_text()))))
        except (ValueError, TypeError) as e:
            log.warning(f"checkpoint {path.parent}: its marker is damaged ({e}): skipped")
    return sorted(found, key=lambda f: -f[1].version)


def damaged(path: Path, marker: Marker, rank: int, world: int) -> list[str]:
    """The files of this rank's share whose bytes are not those of the marker."""
    return [name for name in sorted(marker.files)[rank::world]
            if not (path / name).is_file() or digest_of(path / name) != marker.files[name]]


def file_names(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*") if p.is_file() and p.name != MARKER)


def digest_of(file: Path) -> str:
    with open(file, "rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def clear(folder: Path, version: int) -> Path:
    """Room for a checkpoint: removes one of the same version, which was not used or is being made again."""
    path = folder / tag(version)
    (path / MARKER).unlink(missing_ok=True)  # first: without it the rest does not count
    shutil.rmtree(path, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    return path


def commit(path: Path, marker: Marker) -> None:
    """Say that the checkpoint is complete."""
    for name in marker.files:
        handle = os.open(path / name, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    temporary = path / f"{MARKER}.tmp"
    with open(temporary, "w") as file:
        json.dump(dataclasses.asdict(marker), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path / MARKER)


def prune(folder: Path, keep: int) -> None:
    """Keep the newest `keep` complete checkpoints; remove older ones and what was never completed."""
    kept = {path for path, _ in markers(folder)[:keep]}
    for path in folder.glob("step-*"):
        if path not in kept:
            (path / MARKER).unlink(missing_ok=True)
            shutil.rmtree(path)
