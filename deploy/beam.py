"""Flink's Python jar with two classes of Beam changed, for the local stack.

1. Servers inside the task manager listen on the loopback. Beam asks for a loopback address, then hands only its port to gRPC
   (`NettyServerBuilder.forPort(address.getPort())`), so that the servers its workers talk to, which ask nobody who they are, listen on
   every interface. No option changes that. Here the call becomes `NettyServerBuilder.forAddress(address)`.
2. Closing a worker's environment does not end the task manager. When a worker dies, or a job is cancelled, while a bundle is open, Flink's
   thread that finishes the bundle and the one that closes the environment both give back its last reference; the second one throws
   ("Reference count must not be negative"), Flink takes an exception during clean-up as fatal, and the task manager exits with all that
   runs in it. Here the reference that is not there is given back in silence.

Any other jar than the one this was made for is refused.
"""

from __future__ import annotations

import shutil
import struct
import zipfile
from pathlib import Path

SERVER = "org/apache/beam/sdk/fn/server/ServerFactory$InetSocketAddressServerFactory.class"
CLIENT = "org/apache/beam/runners/fnexecution/control/DefaultJobBundleFactory$WrappedSdkHarnessClient.class"
BUILDER = b"org/apache/beam/vendor/grpc/v1p60p1/io/grpc/netty/NettyServerBuilder"
PRECONDITIONS = b"org/apache/beam/vendor/guava/v32_1_2_jre/com/google/common/base/Preconditions"
#: Bytes of a constant after its tag, by tag (JVM specification, 4.4); Utf8 (1) has its length in front.
SIZES = {3: 4, 4: 4, 5: 8, 6: 8, 7: 2, 8: 2, 9: 4, 10: 4, 11: 4, 12: 4, 15: 3, 16: 2, 17: 4, 18: 4, 19: 2, 20: 2}
UTF8, LONG, DOUBLE, METHOD_REF, NAME_AND_TYPE = 1, 5, 6, 10, 12
ALOAD_1, INVOKEVIRTUAL, INVOKESTATIC, NOP, POP2 = 0x2B, 0xB6, 0xB8, 0x00, 0x58

CHANGED = "Beam has changed, and with it what must be changed here"


class UnknownClass(ValueError):
    """The class is not the one the change was made for."""


def patch_jar(source: Path, target: Path) -> None:
    """Copy a jar with both classes replaced. Raises UnknownClass."""
    shutil.copyfile(source, target)
    with zipfile.ZipFile(target, "a") as jar:
        for name, patch in ((SERVER, listen_on_the_address), (CLIENT, forgive_a_second_close)):
            changed = patch(jar.read(name))
            old = jar.getinfo(name)
            jar.filelist.remove(old)  # its bytes stay in the file, out of the directory; the rest is not compressed again
            del jar.NameToInfo[name]
            jar.writestr(name, changed, zipfile.ZIP_DEFLATED)


def listen_on_the_address(data: bytes) -> bytes:
    """SERVER with `forPort(address.getPort())` turned into `forAddress(address)`. Raises UnknownClass."""
    pool, end = _constants(data)
    get_port, _ = _method(pool, b"java/net/InetSocketAddress", b"getPort")
    for_port, named = _method(pool, BUILDER, b"forPort")
    call = struct.pack(">BBHBH", ALOAD_1, INVOKEVIRTUAL, get_port, INVOKESTATIC, for_port)
    _only_once(data, call, "forPort")
    count = struct.unpack_from(">H", data, 8)[0]  # one more than the last index
    pool[named] = (NAME_AND_TYPE, struct.pack(">HH", count, count + 1))
    pool[count] = (UTF8, b"forAddress")
    pool[count + 1] = (UTF8, b"(Ljava/net/SocketAddress;)L" + BUILDER + b";")
    constants = b"".join(
        bytes([tag]) + (struct.pack(">H", len(value)) if tag == UTF8 else b"") + value for _, (tag, value) in sorted(pool.items()))
    rest = data[end:].replace(call, struct.pack(">BBBBBH", ALOAD_1, NOP, NOP, NOP, INVOKESTATIC, for_port))
    return data[:8] + struct.pack(">H", count + 2) + constants + rest


def forgive_a_second_close(data: bytes) -> bytes:
    """CLIENT with the one `checkState(refCount >= 0, text)` turned into nothing. Raises UnknownClass."""
    check, _ = _method(_constants(data)[0], PRECONDITIONS, b"checkState")
    call = struct.pack(">BH", INVOKESTATIC, check)
    _only_once(data, call, "checkState")
    return data.replace(call, bytes([POP2, NOP, NOP]))  # its two arguments leave the stack unread


def _only_once(data: bytes, call: bytes, name: str) -> None:
    if data.count(call) != 1:
        raise UnknownClass(f"{name} is called in {data.count(call)} places, not in one: {CHANGED}")


def _method(pool: dict[int, tuple[int, bytes]], owner: bytes, name: bytes) -> tuple[int, int]:
    """(index of the method reference, index of its name and type)"""

    def text(index: int) -> bytes:
        return pool[index][1]

    for index, (tag, value) in pool.items():
        if tag == METHOD_REF:
            of, named = struct.unpack(">HH", value)
            if text(struct.unpack(">H", pool[of][1])[0]) == owner and text(struct.unpack(">HH", pool[named][1])[0]) == name:
                return index, named
    raise UnknownClass(f"{owner.decode()}.{name.decode()} is not called: {CHANGED}")


def _constants(data: bytes) -> tuple[dict[int, tuple[int, bytes]], int]:
    """({index: (tag, value)} of the constant pool, offset of what follows it)."""
    magic, count = struct.unpack_from(">I4xH", data)
    if magic != 0xCAFEBABE:
        raise UnknownClass("no class file")
    pool, at, index = {}, 10, 1
    while index < count:
        tag = data[at]
        start = at + 1
        if tag == UTF8:
            start += 2
            size = struct.unpack_from(">H", data, at + 1)[0]
        else:
            size = SIZES[tag]
        pool[index] = (tag, data[start : start + size])
        at = start + size
        index += 2 if tag in (LONG, DOUBLE) else 1
    return pool, at
