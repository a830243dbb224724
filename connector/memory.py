"""Memory for a page pool that other processes of this host can map.

It lies in a memfd, which has no name to leak and is gone with its last mapping. It is sealed against shrinking, so that
a peer that has mapped it can never be hit by a page that has vanished.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os

from connector.transport.base import Memory


class PoolMemory:
    """`length` zero bytes: as `bytes` here, as `memory` for a connector.

    Raises:
        OSError: the kernel refuses that much.
    """

    def __init__(self, length: int) -> None:
        self._fd = os.memfd_create("kvferry-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self._fd, length)
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            self.bytes = mmap.mmap(self._fd, length)
        except OSError:
            os.close(self._fd)
            raise
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))
        self.memory = Memory(address=address, length=length, fd=self._fd)

    def close(self) -> None:
        """Close the descriptor; the memory goes with the last object that looks at it. Closing twice is harmless."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
