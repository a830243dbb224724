"""The owner: the process of `kvferry up`, for as long as the cluster lives.

It holds the cluster's name, looks at the model, starts Ray and the members, watches them, and ends all of it whatever
happens: a signal, a failure, a death. The first signal cancels what is going on, at any moment, and stops things in
order; the second one kills. Should the owner itself be killed, its guard cleans up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import shutil
import signal
import sys
from typing import NoReturn

from deploy import paths
from deploy.demand import demands, refuse_shortage
from deploy.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, DeployError, StartFailed
from deploy.guard import Guard, become_guard, clean_up
from deploy.model.resolve import ResolvedModel, inspect, resolve_model
from deploy.model.store import ModelStore
from deploy.output import redirect_output
from deploy.ports import refuse_busy_ports
from deploy.processes import end_session, identify, python_environment
from deploy.ray_session import RaySession
from deploy.reporting import Ended, Progress, Ready, Reporter
from deploy.settings import Settings
from deploy.state import ClusterState, GatewayRecord, Phase, StateFile, WorkerRecord
from deploy.summary import summarise

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
ORDERLY_END_S = 3.0


class Owner:
    """One run of one cluster."""

    def __init__(self, settings: Settings, reporter: Reporter) -> None:
        self._settings = settings
        self._reporter = reporter
        self._state_file = StateFile(paths.state_dir(settings.cluster))
        self._logs = paths.logs_dir(settings.cluster, settings.log.folder)
        self._session = secrets.token_hex(16)
        self._token = secrets.token_hex(32)
        self._session_dir = ""
        self._members: tuple[tuple[WorkerRecord, ...], tuple[GatewayRecord, ...]] = ((), ())
        self._was_ready = False
        self._signals = 0
        self._ray_ended = True

    def run(self) -> int:
        """Everything from the first check to the last process. Returns the exit code."""
        code, message = asyncio.run(self._until_signalled())
        self._reporter.report(Ended(code, message))
        if not self._ray_ended:
            self._end_at_once(code)
        return code

    async def _until_signalled(self) -> tuple[int, str]:
        work = asyncio.create_task(self._own())
        loop = asyncio.get_running_loop()
        for number in SIGNALS:
            loop.add_signal_handler(number, self._signalled, work)
        try:
            await work
        except asyncio.CancelledError:
            return (EXIT_OK, "") if self._was_ready else (EXIT_INTERRUPTED, "interrupted; everything has been stopped")
        except DeployError as error:
            return error.exit_code, str(error)
        except Exception as error:
            logger.exception("unexpected error")
            return EXIT_FAILED, f"unexpected error: {str(error) or type(error).__name__}; details in {self._logs}"
        return EXIT_OK, ""

    def _signalled(self, work: asyncio.Task[None]) -> None:
        self._signals += 1
        if self._signals == 1:
            work.cancel()
            return
        self._reporter.report(Ended(EXIT_INTERRUPTED, "interrupted twice; everything is being killed"))
        self._end_at_once(EXIT_INTERRUPTED)

    def _end_at_once(self, code: int) -> NoReturn:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        become_guard(self._session, self._session_dir, self._state_file.folder, code)

    async def _own(self) -> None:
        with self._state_file.own():
            previous = self._state_file.read()
            if previous is not None:
                self._progress("cleaning up after a run that was killed")
                await asyncio.to_thread(clean_up, previous.session, previous.session_dir, self._state_file)
            refuse_busy_ports(self._settings.gateway)
            if not self._settings.ray.address:
                cpus = self._settings.ray.num_cpus or os.cpu_count() or 1
                asked = [demand.only("CPU") for demand in demands(self._settings)]
                refuse_shortage(asked, [{"CPU": float(cpus)}])
            self._open_logs()
            self._session_dir = str(paths.new_session_dir())
            self._write_state("STARTING")
            guard = Guard(self._session, self._session_dir, self._state_file.folder)
            try:
                await self._serve()
            finally:
                await self._leave_nothing(guard)

    async def _serve(self) -> None:
        model = await self._find_model()
        ray = RaySession(self._settings.ray, self._session, self._session_dir)
        cluster = None
        try:
            self._progress("starting Ray" if ray.local else f"joining Ray at {self._settings.ray.address}", "ray")
            os.environ.update(python_environment())
            await ray.start()
            self._progress("running", "ray", done=True)
            # Imports Ray, which reads its environment then.
            from deploy.cluster import Cluster
            from deploy.creation import Run

            run = Run(self._settings, model, self._token, self._session, self._logs)
            cluster = Cluster(run, self._reporter)
            started = await cluster.start()
            self._members = (started.workers, started.gateways)
            self._was_ready = True
            self._write_state("READY")
            self._reporter.report(Ready(summarise(run, started)))
            await cluster.watch()
        finally:
            self._write_state("STOPPING")
            if cluster is not None:
                await cluster.stop()
            self._progress("ending Ray")
            self._ray_ended = await ray.stop()

    async def _find_model(self) -> ResolvedModel:
        settings = self._settings
        self._progress("looking", "model")
        store = ModelStore(paths.models_dir())
        model = await resolve_model(
            settings.model, settings.served_name, store, lambda phase: self._progress(phase, "model")
        )
        await asyncio.to_thread(inspect, model)
        self._progress(model.served_name, "model", done=True)
        return model

    async def _leave_nothing(self, guard: Guard) -> None:
        grace_s = ORDERLY_END_S if self._ray_ended else 0.0
        remaining = await asyncio.to_thread(end_session, self._session, grace_s=grace_s)
        shutil.rmtree(self._session_dir, ignore_errors=True)
        guard.dismiss()
        if remaining:
            listed = ", ".join(str(process.pid) for process in remaining)
            raise StartFailed(f"these processes could not be ended: {listed}")
        self._progress("everything has been stopped", done=True)

    def _open_logs(self) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        for old in self._logs.glob("*.log"):
            old.unlink()
        redirect_output(self._logs / "owner.log", self._settings.log.level)

    def _write_state(self, phase: Phase) -> None:
        workers, gateways = self._members
        self._state_file.write(
            ClusterState(
                cluster=self._settings.cluster,
                phase=phase,
                owner=identify(os.getpid()),
                session=self._session,
                session_dir=self._session_dir,
                logs_dir=str(self._logs),
                token=self._token,
                stop_grace_s=self._settings.stop_grace_s,
                workers=workers,
                gateways=gateways,
            )
        )

    def _progress(self, phase: str, subject: str = "shutdown", *, done: bool = False) -> None:
        self._reporter.report(Progress(subject, phase, done))
