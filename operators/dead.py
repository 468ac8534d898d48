"""Dead letters: a record that a stage cannot use goes to `dead` with its cause and its bytes, and the stream goes on."""

from __future__ import annotations

from operators.log import Writer
from schemas.record import encode
from schemas.records import Dead, now
from schemas.settings import KafkaSettings
from schemas.topics import DEAD, topic


class DeadLetters:
    """Callable (cause, original, group_id, sample_index); returns when the broker has the letter. The producer is made at the first one."""

    def __init__(self, kafka: KafkaSettings, run_id: str, stage: str, source: str):
        self._kafka, self._run_id, self._stage, self._source = kafka, run_id, stage, source
        self._writer: Writer | None = None
        self.count = 0

    def __call__(self, cause: str, original: bytes, group_id: str | None = None, sample_index: int | None = None) -> None:
        if self._writer is None:
            self._writer = Writer(self._kafka)
        self.count += 1
        letter = Dead(run_id=self._run_id, stage=self._stage, topic=self._source, cause=cause, group_id=group_id,
                      sample_index=sample_index, original=original, at=now())
        self._writer.write(topic(self._run_id, DEAD), encode([letter]))
