"""Which libucp this process uses: the system's, which has the verbs transports, or the wheel's.

Two of them in one process crash each other, so one that is loaded already (by another library) is the one to use.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from connector.errors import RegistrationError

SYSTEM = "libucp.so.0"


def find_library(wanted: str) -> str:
    """A path, or a name for the loader. `wanted` is "", "system", "wheel" or a path.

    "" takes what is loaded; else the system's where there are RDMA devices, if it exists; else the wheel's.

    Raises:
        RegistrationError: the wheel or the file is not there.
    """
    if wanted == "system":
        return SYSTEM
    if wanted == "wheel":
        return str(_wheel())
    if wanted:
        if not Path(wanted).is_file():
            raise RegistrationError(f"connector.ucx_library is {wanted!r}, which is no file")
        return wanted
    loaded = loaded_library()
    if loaded is not None:
        return loaded
    if has_rdma_devices() and _system_has_it():
        return SYSTEM
    return str(_wheel())


def has_rdma_devices() -> bool:
    """Whether the kernel knows an RDMA device."""
    devices = Path("/sys/class/infiniband")
    return devices.is_dir() and any(devices.iterdir())


def loaded_library() -> str | None:
    """The file of the libucp that is in this process already, whoever loaded it."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        path = line.partition("/")[2]
        if path and Path(path).name.startswith("libucp"):
            return f"/{path}"
    return None


def _system_has_it() -> bool:
    folders = (Path("/usr/lib64"), Path("/usr/lib"), *Path("/usr/lib").glob("*-linux-gnu"))
    return any((folder / SYSTEM).exists() for folder in folders)


def _wheel() -> Path:
    package = importlib.util.find_spec("libucx")
    if package is None or package.origin is None:
        raise RegistrationError("UCX is not installed: neither the libucx-cu12 wheel nor a system library was found")
    return Path(package.origin).parent / "lib" / SYSTEM
