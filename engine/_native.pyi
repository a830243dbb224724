"""The engine's kernels (see engine/native)."""

def available_isas() -> list[str]:
    """Kernel variants that run on this processor, best first, which is the one in use."""

def use_isa(name: str) -> None:
    """Use another variant, in the whole process.

    Raises:
        ValueError: it does not run here; the message names those that do.
    """
