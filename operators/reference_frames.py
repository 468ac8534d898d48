"""The frames between the reference operator and its child: kinds, and a record with its name."""

from __future__ import annotations

import struct

SCORE = 1  # to the child: ident, rollouts
SCORED = 2  # from it: ident, rollouts; nothing if none of its rollouts can be scored
REFUSED = 3  # from it, before the record is answered: cause, the rollouts that cannot be scored
READY = 4  # from it: the reference model's name
_LENGTH = struct.Struct("<H")


def pack_record(ident: str, record: bytes) -> bytes:
    name = ident.encode()
    return _LENGTH.pack(len(name)) + name + record


def unpack_record(payload: bytes) -> tuple[str, bytes]:
    (length,) = _LENGTH.unpack_from(payload)
    at = _LENGTH.size + length
    return payload[_LENGTH.size:at].decode(), payload[at:]
