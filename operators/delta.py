"""A version's bytes as their difference to another version's: lossless, and small where few values changed.

At the learning rates of reinforcement learning most bfloat16 weights round to what they were: the update is below half a unit in the
last place. What is sent is where values changed and by how many units. Positions (as gaps) and differences are integers, nearly all of
them small; their bytes are laid out by significance, so that zstd finds one plane of information and several of zeros.

Promises: `apply(base, make(base, new))` makes `new`, bit by bit; what is no delta for a base is refused, though only a digest of the
result can tell that the right base was taken. Knows bytes; neither tensors nor events.
"""

from __future__ import annotations

import struct

import numpy as np
import pyarrow as pa

_HEADER = struct.Struct("<8sBQQ")  # magic, unit, length of the result, number of changed units
_MAGIC = b"PLDELTA1"
_CHUNK = 32 << 20  # bytes compared at a time
_PLANE = struct.Struct("<QQ")  # bytes of a plane, and of its compressed form


class BadDelta(ValueError):
    """The bytes are no delta, or not one for this base."""


def make(base: memoryview | bytes, new: memoryview | bytes, unit: int) -> bytes:
    """The delta from base to new, which have the same length; `unit` is the size of a value in bytes (2 for bfloat16, 4 for float32)."""
    if len(base) != len(new):
        raise BadDelta(f"base and new version differ in length: {len(base)} and {len(new)} bytes")
    whole = len(new) // unit * unit
    step = _CHUNK // unit * unit
    positions, differences = [], []
    for at in range(0, whole, step):
        old, now = (_units(x, at, min(at + step, whole), unit) for x in (base, new))
        changed = np.flatnonzero(old != now)
        positions.append(changed.astype(np.int64) + at // unit)
        differences.append(now[changed] - old[changed])  # modulo 2^bits
    where = np.concatenate([np.empty(0, np.int64), *positions])
    gaps = np.diff(where, prepend=0)
    if gaps.size and gaps.max() >= 1 << 32:
        raise BadDelta(f"{gaps.max()} values in a row are unchanged: more than a gap of 32 bits can say")
    signed = np.concatenate([np.empty(0, f"u{unit}"), *differences]).astype(f"u{unit}").view(f"i{unit}")
    zigzag = ((signed << 1) ^ (signed >> (8 * unit - 1))).view(f"u{unit}")  # 0, -1, 1, -2, ... as 0, 1, 2, 3, ...
    planes = b"".join([_pack(gaps.astype("<u4")), _pack(zigzag), bytes(new[whole:])])
    return _HEADER.pack(_MAGIC, unit, len(new), where.size) + planes


def apply(buffer: bytearray, delta: memoryview | bytes) -> None:
    """Turn a base's bytes into the new version's, in place. Raises BadDelta; the buffer's content is then of no version."""
    try:
        magic, unit, length, count = _HEADER.unpack_from(delta)
        if magic != _MAGIC or unit not in (1, 2, 4, 8):
            raise BadDelta("it does not begin as one")
        if length != len(buffer):
            raise BadDelta(f"it is for a base of {length} bytes, and this one has {len(buffer)}")
        at = _HEADER.size
        gaps, at = _unpack(delta, at, 4, count)
        zigzag, at = _unpack(delta, at, unit, count)
        whole = length // unit * unit
        if len(delta) - at != length - whole:
            raise BadDelta("its length is not what its header says")
    except (struct.error, pa.ArrowException, OSError, ValueError) as e:
        raise BadDelta(f"{len(delta)} bytes that are no delta: {e}") from e
    positions = np.cumsum(gaps, dtype=np.int64)
    if count and positions[-1] >= whole // unit:
        raise BadDelta(f"it changes value {positions[-1]} of {whole // unit}")
    differences = (zigzag >> 1) ^ (0 - (zigzag & 1))
    values = _units(buffer, 0, whole, unit)
    values[positions] += differences.astype(values.dtype)
    buffer[whole:] = delta[at:]


def _units(data: memoryview | bytes | bytearray, start: int, end: int, unit: int) -> np.ndarray:
    return np.frombuffer(data, dtype=f"<u{unit}", count=(end - start) // unit, offset=start)


def _pack(values: np.ndarray) -> bytes:
    planes = values.view(np.uint8).reshape(-1, values.itemsize)
    out = []
    for i in range(values.itemsize):
        plane = np.ascontiguousarray(planes[:, i]).tobytes()
        packed = pa.compress(plane, codec="zstd", asbytes=True)
        out += [_PLANE.pack(len(plane), len(packed)), packed]
    return b"".join(out)


def _unpack(delta: memoryview | bytes, at: int, itemsize: int, count: int) -> tuple[np.ndarray, int]:
    planes = np.empty((count, itemsize), np.uint8)
    for i in range(itemsize):
        size, packed = _PLANE.unpack_from(delta, at)
        at += _PLANE.size
        if size != count or at + packed > len(delta):
            raise BadDelta("a plane is cut short")
        planes[:, i] = np.frombuffer(pa.decompress(delta[at:at + packed], decompressed_size=size, codec="zstd"), np.uint8)
        at += packed
    return planes.reshape(-1).view(f"<u{itemsize}"), at
