"""Everything the `kvferry` command says no with, and the exit code that goes with it.

DeployError                  one sentence: what happened, with which value, what to do
├── Refused             2    nothing was started, and starting again as it stands would be refused again
│   ├── SettingError         a key, a value or a combination of them
│   ├── ModelRefused         the model is missing, incomplete or of an unsupported kind
│   ├── PortBusyError        a gateway's port is taken
│   ├── ResourcesError       Ray does not have what the workers ask for
│   └── AlreadyRunning       a cluster of that name is up
├── NotRunning          3    there is no such cluster
├── MeasurementFailed   1    a measurement broke, or what it measured did not do what it says
└── StartFailed         1    something broke on the way up, or later
    ├── ConversionFailed     the default model could not be fetched or converted
    └── WorkerDied           a worker's process ended by itself; carries the end of its log
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_NOT_RUNNING = 3
EXIT_INTERRUPTED = 130


class DeployError(Exception):
    """Base of everything this package raises on purpose."""

    exit_code = EXIT_FAILED


class Refused(DeployError):
    """Nothing was started; the request has to change first."""

    exit_code = EXIT_REFUSED


class SettingError(Refused):
    """A setting has an unknown key or a value that cannot be."""


class ModelRefused(Refused):
    """The model cannot be served."""


class PortBusyError(Refused):
    """A gateway's port is taken."""

    def __init__(self, host: str, port: int) -> None:
        super().__init__(
            f"port {port} on {host} is already in use; stop what listens there or choose another one with --port"
        )
        self.port = port


class ResourcesError(Refused):
    """Ray does not have what the workers ask for."""


class AlreadyRunning(Refused):
    """A cluster of that name is up."""


class NotRunning(DeployError):
    """There is no such cluster."""

    exit_code = EXIT_NOT_RUNNING


class MeasurementFailed(DeployError):
    """A measurement broke, or found that what it measures does not do what it says."""


class StartFailed(DeployError):
    """Something broke on the way up, or later."""


class ConversionFailed(StartFailed):
    """A model could not be fetched or converted."""


class WorkerDied(StartFailed):
    """A worker's process ended by itself."""

    def __init__(self, name: str, reason: str, log_tail: str) -> None:
        ending = f"\nThe end of its log:\n{log_tail}" if log_tail else ""
        super().__init__(f"{name} died: {reason}{ending}")
        self.name = name
