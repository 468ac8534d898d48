"""The control topic: what reaches all three jobs."""

from __future__ import annotations

from operators.log import Writer
from schemas.record import encode
from schemas.records import Control, now
from schemas.settings import Settings
from schemas.topics import CONTROL, topic


def say(settings: Settings, kind: str, reason: str) -> None:
    """Write a control record. Raises BrokerAway."""
    writer = Writer(settings.kafka)
    writer.write(topic(settings.run.id, CONTROL), encode([Control(run_id=settings.run.id, kind=kind, reason=reason, at=now())]))
    writer.close()
