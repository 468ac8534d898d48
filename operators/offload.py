"""The thin Flink function around a service in a child process: generation, reward and reference share it.

Promises: a record that came in is answered, or lies in the keyed state of its slot and is submitted again when that slot is next seen
after a restore; it leaves that state after its answer has been emitted, never before; nothing blocks Flink's thread. Records wait in
`MapState[ident -> record]`, answers are drained by processing-time timers. It does not know what a record or an answer is: that is the
service's business.

A slot is seen when a record or a timer of it comes. Timers registered in the bundle that a checkpoint ends are not in that checkpoint
(PyFlink registers them behind it), so that a restored slot may have none: whoever feeds this function sends each slot an empty record now
and then while nothing moves (`operators.training.Waker`).
"""

from __future__ import annotations

import logging
import struct
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from pyflink.common import Types
from pyflink.datastream.functions import KeyedProcessFunction, RuntimeContext
from pyflink.datastream.state import MapStateDescriptor

from operators.lifeline import die_with_parent

MAX_PARALLELISM = 128
BACK_OFF = 4  # ticks: how far apart looks at a service get that has no answers
_ATTEMPT = struct.Struct("<I")  # in front of each record in the state

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Runtime:
    """What a service may know of the subtask it serves. `gauge(name, fn)` registers a metric whose value is an int."""

    subtask: int
    parallelism: int
    attempt: int
    gauge: Callable[[str, Callable[[], int]], None]


class Service(Protocol):
    """What does the work. All methods are called from Flink's thread and must not block."""

    def submit(self, ident: str, record: bytes, attempt: int) -> None:
        """Take a record; `attempt` is 0 at first, +1 each time it is submitted again after a restore."""

    def drain(self) -> list[tuple[str, list]]:
        """(ident, outputs) of what was finished since the last call, whatever its key; an output that answers several records comes with
        the first of them."""

    def poll(self) -> None:
        """Raise if the service is beyond repair: the job then fails with that cause."""

    def close(self) -> None:
        """End it."""


class Offload(KeyedProcessFunction):
    """Hand each record to a service and emit what it makes of it; records are keyed by a slot of `slot_keys`.

    Not for work that takes less than a tick: it costs a state write, a state removal and a share of a timer a record.

        stream.key_by(slot, Types.INT()).process(Offload(make_service), output_type)

    `make(runtime)` makes the service in the worker; `tick_ms` is how often answers are looked for, up to four times as long while there
    are none. A record's outputs are yielded exactly once an incarnation; after a restore a record can be answered again. An empty
    record only wakes the slot: Flink opens a Python function at its first element, and a service may need long to start. `name` and the
    subtask name the worker's process; `silence_s` is for `operators.lifeline`.
    """

    def __init__(self, make: Callable[[Runtime], Service], *, tick_ms: int = 20, name: str | None = None, silence_s: float = 300.0):
        self._make, self._tick_ms, self._name, self._silence_s = make, tick_ms, name, silence_s

    def open(self, context: RuntimeContext) -> None:
        die_with_parent(self._name and f"{self._name}-{context.get_index_of_this_subtask()}", self._silence_s)
        # A type as a module global, or made before the job is shipped, cannot be pickled.
        self._pending = context.get_map_state(MapStateDescriptor("pending", Types.STRING(), Types.PRIMITIVE_ARRAY(Types.BYTE())))
        self._incarnation = uuid.uuid4().hex[:12]
        self._count = 0
        self._key_of: dict[str, Any] = {}  # what the service holds
        self._held: dict[Any, int] = {}  # key -> records the service holds of it; a key in it has been seen since the restore
        self._answered: dict[Any, list[str]] = {}  # their outputs have left; they leave the state at a timer of their key
        self._near: dict[Any, int] = {}  # newest timers registered, of each key
        self._far: dict[Any, int] = {}
        self._pause, self._looked_at = 1, 0  # ticks until the next look; when the last one was due
        group = context.get_metrics_group().add_group("pipelinerl")
        self._service = self._make(Runtime(
            context.get_index_of_this_subtask(), context.get_number_of_parallel_subtasks(), context.get_attempt_number(),
            lambda name, fn: group.gauge(name, fn)))

    def close(self) -> None:
        if (service := getattr(self, "_service", None)) is not None:
            service.close()

    def process_element(self, value: bytes, ctx: KeyedProcessFunction.Context) -> None:
        key = ctx.get_current_key()
        self._take_up(key)
        self._service.poll()
        if not (record := bytes(value)):
            if self._held[key]:
                self._arm(key, ctx)
            return
        ident = f"{self._incarnation}-{self._count}"
        self._count += 1
        self._pending.put(ident, _ATTEMPT.pack(0) + record)
        self._submit(key, ident, record, 0)
        self._arm(key, ctx)

    def on_timer(self, timestamp: int, ctx: KeyedProcessFunction.OnTimerContext) -> Iterator[Any]:
        key = ctx.get_current_key()
        self._take_up(key)
        self._service.poll()
        drained = self._service.drain()
        if drained:
            self._pause = 1
        elif timestamp > self._looked_at:  # timers of the same instant are one look
            self._pause = min(2 * self._pause, BACK_OFF)
        self._looked_at = timestamp
        for ident, outputs in drained:
            owner = self._key_of.pop(ident, None)
            if owner is None:  # a second answer: the first one has left
                log.warning(f"offload: a second answer for record {ident} is dropped")
                continue
            # At once, whatever its slot: an output may answer records of several, and none of them leaves its state before.
            yield from outputs
            self._answered.setdefault(owner, []).append(ident)
        for ident in self._answered.pop(key, ()):
            self._held[key] -= 1
            self._pending.remove(ident)
        if self._held[key]:
            self._arm(key, ctx)

    def _take_up(self, key: Any) -> None:
        """The first time a key is seen in this incarnation: what its state holds was submitted to a service that is gone."""
        if key in self._held:
            return
        self._held[key] = 0
        restored = [(ident, bytes(stored)) for ident, stored in self._pending.items()]
        for ident, stored in restored:
            (attempt,) = _ATTEMPT.unpack_from(stored)
            self._pending.put(ident, _ATTEMPT.pack(attempt + 1) + stored[_ATTEMPT.size:])
            self._submit(key, ident, stored[_ATTEMPT.size:], attempt + 1)

    def _submit(self, key: Any, ident: str, record: bytes, attempt: int) -> None:
        self._key_of[ident] = key
        self._held[key] += 1
        self._pause = 1
        self._service.submit(ident, record, attempt)

    def _arm(self, key: Any, ctx: KeyedProcessFunction.Context) -> None:
        """Keep a timer of this key ahead. A tick costs a bundle, whatever the number of its timers: those of all keys fall together."""
        timers = ctx.timer_service()
        now = timers.current_processing_time()
        pause = self._pause * self._tick_ms
        near = (now // pause + 1) * pause
        if self._near.get(key) != near:  # each registration is a message to the JVM
            self._near[key] = near
            timers.register_processing_time_timer(near)
        # One at least a second ahead was most likely registered in an earlier bundle than the one that a checkpoint ends.
        far = (now // 1000 + 2) * 1000
        if self._far.get(key) != far:
            self._far[key] = far
            timers.register_processing_time_timer(far)


def slot_keys(count: int, max_parallelism: int = MAX_PARALLELISM) -> list[int]:
    """INT keys, one a slot, that spread evenly over the subtasks at every parallelism up to `count`: their numbers differ by one at most.

    For more than 20 slots that are no power of two, the granularity of key groups can make it two.
    Slot i goes to another subtask than slot i + 1 as far as the parallelism allows, so that records dealt out in turn keep all
    subtasks equally busy. Holds for `key_by(selector, Types.INT())` of PyFlink, whose key in Java is a row of one field. Raises
    ValueError if there are more slots than key groups.
    """
    if not 0 < count <= max_parallelism:
        raise ValueError(f"{count} slots: there must be at least one and at most as many as key groups ({max_parallelism})")
    places = sorted(range(count), key=_radical_inverse)  # places[r] = the slot that takes the r-th place from the left
    group_of = {slot: (2 * place + 1) * max_parallelism // (2 * count) for place, slot in enumerate(places)}
    wanted = {group: slot for slot, group in group_of.items()}
    keys: dict[int, int] = {}
    candidate = 0
    while wanted:
        slot = wanted.pop(key_group(candidate, max_parallelism), None)
        if slot is not None:
            keys[slot] = candidate
        candidate += 1
    return [keys[slot] for slot in range(count)]


def key_group(key: int, max_parallelism: int = MAX_PARALLELISM) -> int:
    """Flink's key group of an INT key of a PyFlink stream (KeyGroupRangeAssignment.assignToKeyGroup of `Row.of(key)`)."""
    # Row.hashCode: 31 * kind (INSERT, 0) + the deep hash of its fields, a list that holds one list of one element.
    return _murmur(_int32(62 + key)) % max_parallelism


def subtask_of(key: int, parallelism: int, max_parallelism: int = MAX_PARALLELISM) -> int:
    """The subtask an INT key goes to (KeyGroupRangeAssignment.computeOperatorIndexForKeyGroup)."""
    return key_group(key, max_parallelism) * parallelism // max_parallelism


def _radical_inverse(n: int) -> float:
    """Van der Corput: the bits of n behind the binary point; each prefix of 0, 1, 2, ... is spread evenly over [0, 1)."""
    return sum(((n >> bit) & 1) / (2 << bit) for bit in range(n.bit_length()))


def _int32(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def _murmur(code: int) -> int:
    """org.apache.flink.util.MathUtils.murmurHash: 32-bit integer to a non-negative one."""
    mask = 0xFFFFFFFF

    def rotate(x: int, by: int) -> int:
        return (x << by | x >> (32 - by)) & mask

    h = rotate((code & mask) * 0xCC9E2D51 & mask, 15) * 0x1B873593 & mask
    h = (rotate(h, 13) * 5 + 0xE6546B64) & mask
    h ^= 4
    h = (h ^ h >> 16) * 0x85EBCA6B & mask
    h = (h ^ h >> 13) * 0xC2B2AE35 & mask
    h = _int32(h ^ h >> 16)
    return h if h >= 0 else (-h if h != -(2**31) else 0)
