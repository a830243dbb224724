"""The prefill worker: computes prompts, draws their first tokens, holds their pages until they have been fetched."""

from prefill.config import PrefillConfig
from prefill.worker import PrefillWorker

__all__ = ["PrefillConfig", "PrefillWorker"]
