"""A process that connects to a far end with forged keys, since UCX might not survive them. Says what came of each."""

from __future__ import annotations

import hashlib
import json
import select
import sys

import msgspec
import numpy as np

from connector.errors import PeerLostError, UnreachableError
from tests.connector.far_process import SIZES, pattern
from tests.connector.near import PATIENCE_S, Near, runs

SENTINEL = 0xA5


def sealed(description: bytes, **changes: object) -> bytes:
    """The description with changes that its digest agrees with."""
    body = {**msgspec.msgpack.decode(msgspec.msgpack.decode(description)["body"]), **changes}
    encoded = msgspec.msgpack.encode(body)
    return msgspec.msgpack.encode({"body": encoded, "digest": hashlib.blake2b(encoded, digest_size=16).digest()})


def forgeries(description: bytes) -> list[bytes]:
    """The keys of two regions exchanged, then keys of random bytes: with the domains of a real one, and without."""
    first, second = msgspec.msgpack.decode(msgspec.msgpack.decode(description)["body"])["regions"]
    forged = [sealed(description, regions=[{**first, "key": second["key"]}, {**second, "key": first["key"]}])]
    chance = np.random.default_rng(8)
    for domains in (
        first["key"][:9],
        chance.bytes(8) + b"\0",
        b"\xff" * 8 + b"\0",
        b"\x01" + bytes(8),
        b"\x03" + bytes(8),
    ):
        for _ in range(8):
            count = int.from_bytes(domains[:8], "little").bit_count()
            entries = [chance.bytes(int(size)) for size in chance.integers(0, 40, count)]
            key = domains + b"".join(bytes([len(entry)]) + entry for entry in entries)
            forged.append(sealed(description, regions=[{**first, "key": key}, second]))
        forged.append(sealed(description, regions=[{**first, "key": domains + chance.bytes(50)}, second]))
    return forged


def attempt(near: Near, description: bytes) -> str:
    """Connect and read a little of the first region into the middle of ours."""
    mine = near.regions.arrays[0]
    mine[:] = SENTINEL
    try:
        peer = near.transport.connect(description)
    except UnreachableError:
        return "refused"
    try:
        batch = near.post(peer, "read", runs((8192, 4096, 4096)), timeout_s=5.0)
        while batch not in near.completed and peer not in near.down:
            select.select([near.transport.fileno()], [], [], PATIENCE_S)
            near.collect()
    except PeerLostError:
        return "lost"
    finally:
        near.fence(peer)
    assert bool((mine[:8192] == SENTINEL).all())
    assert bool((mine[8192 + 4096 :] == SENTINEL).all())
    if near.completed[batch] is not None:
        return "failed"
    assert np.array_equal(mine[8192 : 8192 + 4096], pattern(100, SIZES[0])[4096:8192]), "read from elsewhere"
    return "read"


def main() -> None:
    """The far end's description comes on the standard input, in hexadecimal digits."""
    near = Near("ucx")
    print(json.dumps([attempt(near, description) for description in forgeries(bytes.fromhex(sys.stdin.read()))]))
    near.close()


if __name__ == "__main__":
    main()
