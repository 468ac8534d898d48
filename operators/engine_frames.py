"""What generation and its engine's child process say to each other: kinds of frames, and how their payloads are laid out."""

from __future__ import annotations

import struct
from collections.abc import Iterable

#: Frames to the child: a sample, a version on offer, the word that all versions on offer at the start have been said.
SUBMIT, OFFER, SERVE = 1, 2, 3
#: Frames from it: the engine is loaded, rollouts that ended, an ack record, measures as JSON, the word that a version is being written.
READY, RESULT, ACK, STATS, WRITING = 1, 2, 3, 4, 5

_SUBMIT = struct.Struct("<HI")  # length of the ident, attempt
_OFFER = struct.Struct("<d")  # heard at, seconds since the epoch
_RESULT = struct.Struct("<IH")  # lengths of the idents and of the group id


def pack_submit(ident: str, attempt: int, record: bytes) -> bytes:
    name = ident.encode()
    return _SUBMIT.pack(len(name), attempt) + name + record


def unpack_submit(payload: bytes) -> tuple[str, int, bytes]:
    length, attempt = _SUBMIT.unpack_from(payload)
    at = _SUBMIT.size + length
    return payload[_SUBMIT.size:at].decode(), attempt, payload[at:]


def pack_offer(heard_at: float, event: bytes) -> bytes:
    return _OFFER.pack(heard_at) + event


def unpack_offer(payload: bytes) -> tuple[float, bytes]:
    return _OFFER.unpack_from(payload)[0], payload[_OFFER.size:]


def pack_result(idents: Iterable[str], group_id: str, rollouts: bytes) -> bytes:
    """The samples that are answered, the group of the first one, and the message of their rollouts."""
    names, group = "\n".join(idents).encode(), group_id.encode()
    return _RESULT.pack(len(names), len(group)) + names + group + rollouts


def unpack_result(payload: bytes) -> tuple[list[str], bytes, bytes]:
    names, group = _RESULT.unpack_from(payload)
    at = _RESULT.size + names
    return payload[_RESULT.size:at].decode().split("\n"), payload[at:at + group], payload[at + group:]
