"""The workers and gateways of one run: started in order, watched, stopped in the opposite order.

Prefill, decode and gateways load concurrently. When all of them are up, the decode workers connect to the prefill pool
(and measure each link), the gateways are told of the decode pool, and a gateway is ready once a real generation has
gone through all three.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import msgspec

from deploy.actors import Link
from deploy.creation import Members, Run, create_members
from deploy.demand import demands
from deploy.errors import StartFailed
from deploy.http_probe import probe
from deploy.member import Member
from deploy.placement import Reservation, reserve
from deploy.reporting import Progress, Reporter
from deploy.state import GatewayRecord, WorkerRecord
from rpc.address import WorkerAddress

T = TypeVar("T")

READY_POLL_S = 0.2


class Started(msgspec.Struct, frozen=True):
    """A cluster that answers."""

    workers: tuple[WorkerRecord, ...]
    gateways: tuple[GatewayRecord, ...]
    links: tuple[Link, ...]


class Cluster:
    """`start` once, then `watch` until something dies or the watcher is cancelled, then `stop`."""

    def __init__(self, run: Run, reporter: Reporter) -> None:
        self._run = run
        self._reporter = reporter
        self._phases: dict[str, str] = {}
        self._reservation: Reservation | None = None
        self._members = Members([], [], [])
        self._deaths: asyncio.Task[None] | None = None

    async def start(self) -> Started:
        """Place and start everything, until a generation has gone through.

        Raises:
            ResourcesError: Ray does not have what the workers ask for.
            StartFailed: a worker failed or died, or it took longer than `start_timeout_s`.
        """
        settings = self._run.settings
        self._reservation = await reserve(demands(settings), settings.placement_timeout_s)
        self._members = create_members(self._run, self._reservation)
        self._deaths = asyncio.create_task(self._first_death())
        try:
            async with asyncio.timeout(settings.start_timeout_s):
                return await self._unless_somebody_dies(self._bring_up())
        except TimeoutError:
            doing = "; ".join(f"{name}: {phase}" for name, phase in self._phases.items())
            raise StartFailed(
                f"not ready within start_timeout_s = {settings.start_timeout_s:g} s ({doing}); logs: {self._run.logs}"
            ) from None

    async def watch(self) -> None:
        """Wait for the first death, for ever if need be.

        Raises:
            WorkerDied: as soon as one did.
        """
        assert self._deaths is not None
        await asyncio.shield(self._deaths)

    async def stop(self) -> None:
        """Drain and stop the gateways, then decode, then prefill. What does not answer is killed."""
        if self._deaths is not None:
            self._deaths.cancel()
            await asyncio.gather(self._deaths, return_exceptions=True)
        for what, pool in (
            ("draining the gateways", self._members.gateways),
            ("stopping decode", self._members.decode),
            ("stopping prefill", self._members.prefill),
        ):
            if pool:
                self._progress("shutdown", what)
                await asyncio.gather(*(member.stop(self._run.settings.stop_grace_s) for member in pool))
        if self._reservation is not None:
            self._reservation.release()

    async def _bring_up(self) -> Started:
        members = self._members
        addresses, gateways = await _together(
            _together(*(self._start_worker(member) for member in (*members.prefill, *members.decode))),
            _together(*(self._start_gateway(member) for member in members.gateways)),
        )
        prefill = [address for address in addresses if address.role == "prefill"]
        decode = [address for address in addresses if address.role == "decode"]
        links = await _together(*(self._connect(member, prefill) for member in members.decode))
        await _together(
            *(self._open(member, record.url, decode) for member, record in zip(members.gateways, gateways, strict=True))
        )
        return Started(
            workers=tuple(map(_record, addresses)),
            gateways=tuple(gateways),
            links=tuple(link for of_one in links for link in of_one),
        )

    async def _start_worker(self, member: Member) -> WorkerAddress:
        address: WorkerAddress = await member.call_and_follow("start", self._progress)
        self._progress(member.name, "loaded", done=True)
        return address

    async def _start_gateway(self, member: Member) -> GatewayRecord:
        self._progress(member.name, "starting its process")
        url, pid = await member.call("start")
        self._progress(member.name, f"listening on {url}")
        return GatewayRecord(member.name, url, pid)

    async def _connect(self, decode: Member, prefill: list[WorkerAddress]) -> list[Link]:
        self._progress(decode.name, "connecting to the prefill workers and measuring")
        links: list[Link] = await decode.call("set_prefill_workers", prefill)
        self._progress(decode.name, "connected", done=True)
        return links

    async def _open(self, gateway: Member, url: str, decode: list[WorkerAddress]) -> None:
        self._progress(gateway.name, "trying a first generation")
        await gateway.call("set_decode_workers", decode)
        while True:
            status, _ = await asyncio.to_thread(probe, f"{url}/ready")
            if status == 200:
                break
            await asyncio.sleep(READY_POLL_S)
        self._progress(gateway.name, f"ready on {url}", done=True)

    async def _first_death(self) -> None:
        await _together(*(member.death() for pool in self._members for member in pool))

    async def _unless_somebody_dies(self, work: Coroutine[Any, Any, T]) -> T:
        assert self._deaths is not None
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, self._deaths}, return_when=asyncio.FIRST_COMPLETED)
            # A death explains a failed call better than the call does.
            if self._deaths.done():
                self._deaths.result()
            return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def _progress(self, name: str, phase: str, *, done: bool = False) -> None:
        self._phases[name] = phase
        self._reporter.report(Progress(name, phase, done))


async def _together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    """The results of all; the first failure cancels the others and is raised."""
    tasks = []
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in work]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in tasks]


def _record(address: WorkerAddress) -> WorkerRecord:
    return WorkerRecord(
        name=address.name,
        role="prefill" if address.role == "prefill" else "decode",
        incarnation=address.incarnation,
        rpc=address.rpc,
        pid=address.pid,
        host=address.host,
    )
