"""How a running cluster is: asked of every gateway and worker at once, whoever does not answer is shown as such."""

from __future__ import annotations

import asyncio
import json

import grpc
import msgspec

from deploy import paths
from deploy.errors import NotRunning
from deploy.http_probe import probe
from deploy.state import ClusterState, GatewayRecord, StateFile, WorkerRecord
from rpc.auth import credentials
from rpc.channel import OPTIONS
from rpc.v1.worker_pb2 import StatusRequest, WorkerStatus
from rpc.v1.worker_pb2_grpc import WorkerStub

ANSWER_TIMEOUT_S = 5.0
HEADINGS = ("", "state", "pid", "host", "free blocks", "sources", "imports", "running", "waiting", "peers")


class PeerReport(msgspec.Struct, frozen=True):
    """A link of a worker. `gb_per_s` is 10^9 bytes a second, measured when it was made."""

    name: str
    transport: str
    gb_per_s: float


class WorkerReport(msgspec.Struct, frozen=True):
    """A worker. `state` is STARTING, READY, DRAINING, DEAD (nobody listens there any more) or UNREACHABLE (no answer).

    `incarnation` is in hexadecimal: JSON numbers do not hold 64 bits everywhere.
    """

    name: str
    incarnation: str
    state: str
    pid: int
    host: str
    blocks_total: int
    blocks_free: int
    sources_held: int
    imports_active: int
    requests_running: int
    requests_waiting: int
    peers: list[PeerReport]


class GatewayReport(msgspec.Struct, frozen=True):
    """A gateway. `state` is READY, STARTING (it answers, but a generation has not gone through) or DEAD."""

    url: str
    state: str


class ClusterReport(msgspec.Struct, frozen=True):
    """A cluster, in the shape that `kvferry status --json` prints."""

    cluster: str
    gateways: list[GatewayReport]
    pools: dict[str, list[WorkerReport]]


def running_state(cluster: str) -> ClusterState:
    """The state of a cluster whose owner is alive.

    Raises:
        NotRunning: there is none.
    """
    state = StateFile(paths.state_dir(cluster)).read()
    if state is None:
        raise NotRunning(f"no cluster called {cluster!r} is up; start it with `kvferry up`")
    if state.owner.process() is None:
        raise NotRunning(f"the owner of cluster {cluster!r} was killed; clean up after it with `kvferry down`")
    return state


async def cluster_report(cluster: str) -> ClusterReport:
    """Ask everybody.

    Raises:
        NotRunning: the cluster is not up.
    """
    state = running_state(cluster)
    gateways, workers = await asyncio.gather(
        asyncio.gather(*(_gateway(record) for record in state.gateways)),
        asyncio.gather(*(_worker(record, state.token) for record in state.workers)),
    )
    pools: dict[str, list[WorkerReport]] = {"prefill": [], "decode": []}
    for record, report in zip(state.workers, workers, strict=True):
        pools[record.role].append(report)
    return ClusterReport(cluster, list(gateways), pools)


def worker_status(record: WorkerRecord, token: str) -> WorkerStatus:
    """A worker's own answer.

    Raises:
        grpc.RpcError: it gave none.
    """
    with grpc.insecure_channel(record.rpc, options=OPTIONS) as channel:
        status: WorkerStatus = WorkerStub(channel).Status(
            StatusRequest(), timeout=ANSWER_TIMEOUT_S, metadata=credentials(token)
        )
        return status


def as_json(report: ClusterReport) -> str:
    """The report for scripts."""
    return json.dumps(msgspec.to_builtins(report), indent=2)


def as_text(report: ClusterReport) -> str:
    """The report for people."""
    if not report.gateways:
        return f"cluster {report.cluster} is starting"
    rows: list[tuple[str, ...]] = [HEADINGS, *(_row(worker) for pool in report.pools.values() for worker in pool)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"cluster {report.cluster}"]
    lines += [f"gateway {gateway.url}  {gateway.state}" for gateway in report.gateways]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(worker: WorkerReport) -> tuple[str, ...]:
    return (
        worker.name,
        worker.state,
        str(worker.pid),
        worker.host,
        f"{worker.blocks_free}/{worker.blocks_total}",
        str(worker.sources_held),
        str(worker.imports_active),
        str(worker.requests_running),
        str(worker.requests_waiting),
        ", ".join(f"{peer.name} by {peer.transport} at {peer.gb_per_s:.1f} GB/s" for peer in worker.peers),
    )


async def _gateway(record: GatewayRecord) -> GatewayReport:
    status, _ = await asyncio.to_thread(probe, f"{record.url}/ready", ANSWER_TIMEOUT_S)
    return GatewayReport(record.url, "DEAD" if status is None else "READY" if status == 200 else "STARTING")


async def _worker(record: WorkerRecord, token: str) -> WorkerReport:
    try:
        status = await asyncio.to_thread(worker_status, record, token)
    except grpc.RpcError as error:
        refused = error.code() == grpc.StatusCode.UNAVAILABLE
        return WorkerReport(
            name=record.name,
            incarnation=f"{record.incarnation:016x}",
            state="DEAD" if refused else "UNREACHABLE",
            pid=record.pid,
            host=record.host,
            blocks_total=0,
            blocks_free=0,
            sources_held=0,
            imports_active=0,
            requests_running=0,
            requests_waiting=0,
            peers=[],
        )
    return WorkerReport(
        name=status.engine_id.name,
        incarnation=f"{status.engine_id.incarnation:016x}",
        state=status.state,
        pid=status.pid,
        host=status.host,
        blocks_total=status.blocks_total,
        blocks_free=status.blocks_free,
        sources_held=status.sources_held,
        imports_active=status.imports_active,
        requests_running=status.requests_running,
        requests_waiting=status.requests_waiting,
        peers=[PeerReport(peer.name, peer.transport, peer.gb_per_s) for peer in status.peers],
    )
