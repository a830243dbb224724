"""The threads that a step computes with."""

from __future__ import annotations

from collections.abc import Mapping


def concerns(compute_threads: int, cores: int, environment: Mapping[str, str]) -> list[str]:
    """What will make steps slow, in words; nothing when all is well.

    A thread that waits for the others of its step spins, unless OpenMP was told otherwise before it was loaded. Where
    it spins on a core that another worker computes on, a linear layer of 0.14 ms was measured to take 24 ms. One
    thread waits for nobody.
    """
    found = []
    if compute_threads > cores:
        found.append(
            f"engine.compute_threads is {compute_threads}, but this process may use {cores} cores; its threads will "
            "wait for each other"
        )
    if compute_threads > 1 and environment.get("OMP_WAIT_POLICY", "").upper() != "PASSIVE":
        found.append(
            "OMP_WAIT_POLICY is not PASSIVE: waiting threads spin, which stalls every worker on this machine; set it "
            "in the environment that starts this process"
        )
    return found
