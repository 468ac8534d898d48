"""`pipelinerl dead`: what stages could not use, with its cause; to look at, to save, and to send again once the cause is gone."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jobs.replay import CLASSES
from operators.log import Writer, read
from schemas.record import BadRecord, decode, name_of, rows_of
from schemas.records import Dead
from schemas.settings import KafkaSettings
from schemas.topics import ACKS, CONTROL, DEAD, PROMPTS, ROLLOUTS, topic

#: Topics that any writer may add to. The others have one owner, whom a second writer would contradict.
OPEN = (PROMPTS, ROLLOUTS, CONTROL, ACKS)


class BadLetter(ValueError):
    """There is no such dead letter, or it must not be sent again; the text says which and why."""


def letters(kafka: KafkaSettings, run_id: str) -> dict[int, Dead]:
    """Offset in the dead topic -> letter, in order. Raises operators.log.NoTopic and BrokerAway."""
    return {m.offset: letter for m in read(kafka, topic(run_id, DEAD)) for letter in rows_of(Dead, [m.value])}


def table(found: dict[int, Dead]) -> str:
    """One line a letter."""
    lines = [f"{'number':>6}  {'when':19}  {'stage':12}  {'bytes':>9}  from, sample, cause"]
    for number, d in found.items():
        sample = "" if d.group_id is None else f", {d.group_id}" + ("" if d.sample_index is None else f" [{d.sample_index}]")
        cause = d.cause.splitlines()[0]
        lines.append(f"{number:6}  {d.at:%Y-%m-%d %H:%M:%S}  {d.stage:12}  {len(d.original):9,}  {d.topic}{sample}: {cause}")
    return "\n".join(lines) if found else "no dead letters"


def pick(found: dict[int, Dead], number: int) -> Dead:
    """Raises BadLetter."""
    if number not in found:
        raise BadLetter(f"there is no dead letter {number}: `pipelinerl dead list` shows {len(found)}")
    return found[number]


def show(letter: Dead) -> str:
    """The whole cause, and the record as far as it can be read."""
    head = f"{letter.stage} refused {len(letter.original)} bytes of {letter.topic} at {letter.at:%Y-%m-%d %H:%M:%S}:\n{letter.cause}\n"
    try:
        name = name_of(letter.original)
        cls = CLASSES[name]
        rows = decode(cls, letter.original)
    except (BadRecord, KeyError):
        return head + f"no record that can be read; it begins with {letter.original[:64]!r}"
    values = ({n: getattr(row, n) for n in cls.arrow_schema.names} for row in rows)
    return head + f"{name}:\n" + "\n".join(json.dumps(v, default=str, ensure_ascii=False, indent=1) for v in values)


def retry(kafka: KafkaSettings, run_id: str, chosen: Sequence[Dead]) -> int:
    """Send the bytes again to where they came from, all or, if one of them must not be, none. Returns their number. Raises BadLetter.

    A sample with a name has its outcome already, and no sample gets two: its prompt is loaded again as another pass instead.
    """
    allowed = {topic(run_id, name) for name in OPEN}
    for letter in chosen:
        if letter.topic not in allowed:
            raise BadLetter(f"what came from {letter.topic} is not sent again: that log has one writer")
        if letter.group_id is not None:
            raise BadLetter(f"the samples of group {letter.group_id} have their outcome (dead), which is final: mend the prompt and load "
                            "it again (`pipelinerl prompts load`, as another data set or with --passes)")
    writer = Writer(kafka)
    try:
        for letter in chosen:
            writer.write(letter.topic, letter.original)
    finally:
        writer.close()
    return len(chosen)
