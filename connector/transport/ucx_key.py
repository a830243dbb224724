"""Whether a packed remote key has the shape of one, before UCX unpacks it.

UCX is not told how long a key is and believes every length in it. A key comes only from a peer that knows the cluster's
token, but a mixed-up one must cost no more than its link. The shape is the same since UCX 1.13, and peers of another
minor version are refused: a map of memory domains (8 bytes, one bit each); the kind of memory (1 byte); for each domain
a length (1 byte) and as many bytes; then at most a device (1 byte) with distances (3 bytes each).

What remains: a key of the right shape with wrong contents. An RDMA device refuses such an access, and the batch fails.
TCP and CMA use no key: a peer that describes wrong addresses lets its own memory be read and written there.
"""

from __future__ import annotations

HEADER_BYTES = 9
LAST_MEMORY_KIND = 4
DISTANCE_BYTES = 3
MARGIN = bytes(256)
"""What follows a key in memory: a domain that takes a forged, too short entry for its own reads no further."""


def why_malformed(key: bytes) -> str:
    """Empty when the key has the shape of one, else what is wrong with it."""
    if len(key) < HEADER_BYTES:
        return f"it has {len(key)} bytes, at least {HEADER_BYTES} are needed"
    if key[HEADER_BYTES - 1] > LAST_MEMORY_KIND:
        return f"there is no kind of memory {key[HEADER_BYTES - 1]}"
    at = HEADER_BYTES
    for _ in range(int.from_bytes(key[: HEADER_BYTES - 1], "little").bit_count()):
        if at >= len(key) or at + 1 + key[at] > len(key):
            return f"it ends within its memory domains, after {len(key)} bytes"
        at += 1 + key[at]
    left = len(key) - at
    if left and (left - 1) % DISTANCE_BYTES:
        return f"{left} bytes follow its memory domains"
    return ""
