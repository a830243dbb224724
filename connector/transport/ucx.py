"""UCX: one-sided get and put through UCP, over RDMA where there is a device, else over what UCX finds.

Peer error handling is always on; without it the death of a peer is never reported. In that mode UCX needs `tcp` among
its transports to reach peers at all, and `RNDV_THRESH=inf` to keep single-copy transports on the same host instead of
silently emulating over TCP. Different UCX minor versions fail or crash each other when keys are unpacked, so that the
description carries the version and `connect` refuses another one.

UCX parses addresses and keys without checking them. A digest keeps damaged ones away from it, and keys are checked for
their shape (`connector.transport.ucx_key` says what remains). Both come only from peers that know the cluster's token.
"""

from __future__ import annotations

import os
import weakref
from typing import Annotated

import msgspec

from connector._native import OutOfBounds, UcpWorker, ucx_version
from connector.errors import OutOfBoundsError, PeerLostError, RegistrationError, TransportError, UnreachableError
from connector.transport.base import FENCE_TIMEOUT_S, Completed, Event, Fenced, Memory, Op, PeerDown, Runs
from connector.transport.registration import pinning_advice, refusal, why_unusable
from connector.transport.sealed import seal, unseal
from connector.transport.ucx_key import MARGIN, why_malformed
from connector.transport.ucx_library import find_library

CONFIG = (("RNDV_THRESH", "inf"),)


Address = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
"""Beyond any real one, and the sum of two of them still fits into 64 bits."""


class _Region(msgspec.Struct, frozen=True):
    base: Address
    length: Address
    key: bytes


class _Description(msgspec.Struct, frozen=True):
    version: str
    address: bytes
    regions: tuple[_Region, ...]


def _missing_tcp() -> str:
    """What to do when the user's choice of transports is why nobody can be reached."""
    chosen = os.environ.get("UCX_TLS", "all")
    named = bool({"all", "tcp"} & set(chosen.removeprefix("^").split(",")))
    if named != chosen.startswith("^"):
        return ""
    return f"; UCX_TLS is {chosen}, add tcp to it: peers whose death is reported cannot be reached without"


def _chosen_devices() -> str:
    chosen = [f"{name}={os.environ[name]}" for name in ("UCX_TLS", "UCX_NET_DEVICES") if name in os.environ]
    return f" ({', '.join(chosen)})" if chosen else ""


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


class UcxTransport:
    """See the module, and `connector.transport.base.Transport`. `library`: see `find_library`.

    Raises:
        RegistrationError: UCX cannot be loaded or initialised.
    """

    name = "ucx"

    def __init__(self, name: str, library: str = "") -> None:
        try:
            path = find_library(library)
            self.version, self.path = ucx_version(path)
            self._worker = UcpWorker(path, f"ucx-{name}", list(CONFIG))
        except RuntimeError as error:
            raise RegistrationError(f"{name}: {error}") from error
        # Nothing touches memory any more when it goes, be it that the process ends.
        weakref.finalize(self, self._worker.close, FENCE_TIMEOUT_S)
        self._owner = name
        self._regions: list[Memory] = []
        self._peers: set[int] = set()
        self._down: set[int] = set()

    def register(self, memory: Memory) -> int:
        """See `Transport.register`."""
        number = len(self._regions)
        if wrong := why_unusable(memory):
            raise refusal(self._owner, self.name, number, memory, wrong)
        try:
            region = self._worker.register_memory(memory.address, memory.length)
        except RuntimeError as error:
            cause = f"{error}{_chosen_devices()}{pinning_advice(memory.length)}"
            raise refusal(self._owner, self.name, number, memory, cause) from error
        self._regions.append(memory)
        return region

    def describe(self) -> bytes:
        """See `Transport.describe`."""
        try:
            regions = tuple(
                _Region(memory.address, memory.length, self._worker.packed_key(index))
                for index, memory in enumerate(self._regions)
            )
            address = self._worker.address()
        except RuntimeError as error:
            raise TransportError(f"{self._owner}: {error}") from error
        return seal(_Description(self.version, address, regions))

    def connect(self, description: bytes) -> int:
        """See `Transport.connect`."""
        described = unseal(description, _Description, self.name)
        if _minor(described.version) != _minor(self.version):
            raise UnreachableError(
                f"the peer uses UCX {described.version}, this worker {self.version}; different minor versions crash "
                "each other, install the same one on both"
            )
        for number, region in enumerate(described.regions):
            if wrong := why_malformed(region.key):
                raise UnreachableError(f"the key of the peer's region {number} is none that UCX packs: {wrong}")
        regions = [(region.base, region.length, region.key + MARGIN) for region in described.regions]
        try:
            peer = self._worker.connect(described.address, regions)
        except RuntimeError as error:
            raise UnreachableError(f"the peer cannot be reached over ucx: {error}{_missing_tcp()}") from error
        self._peers.add(peer)
        return peer

    def post(self, peer: int, op: Op, local_region: int, remote_region: int, runs: Runs, timeout_s: float) -> int:
        """See `Transport.post`."""
        if peer not in self._peers or peer in self._down:
            raise PeerLostError(f"peer {peer} is down, fenced or unknown; connect to it again")
        try:
            return self._worker.post(
                peer, op == "write", local_region, remote_region, runs.local, runs.remote, runs.length, timeout_s
            )
        except OutOfBounds as error:
            raise OutOfBoundsError(str(error)) from None
        except RuntimeError as error:
            raise PeerLostError(str(error)) from error

    def fileno(self) -> int:
        """See `Transport.fileno`."""
        return self._worker.fileno()

    def poll(self) -> list[Event]:
        """See `Transport.poll`."""
        events: list[Event] = []
        for kind, peer, batch, text in self._worker.drain():
            if kind == "completed":
                events.append(Completed(batch=batch, error=text or None))
            elif peer not in self._peers:
                continue  # it could not be connected to
            elif kind == "fenced":
                self._peers.discard(peer)
                self._down.discard(peer)
                events.append(Fenced(peer=peer))
            else:
                self._down.add(peer)
                events.append(PeerDown(peer=peer, cause=text, gone=kind == "lost"))
        return events

    def fence(self, peer: int) -> None:
        """See `Transport.fence`."""
        if peer not in self._peers:
            return
        self._down.add(peer)
        self._worker.fence(peer)

    def close(self) -> None:
        """See `Transport.close`."""
        try:
            self._worker.close(FENCE_TIMEOUT_S)
        except RuntimeError as error:
            raise TransportError(f"{self._owner}: {error}") from error
        self._down |= self._peers
