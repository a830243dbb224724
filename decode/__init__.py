"""The decode worker: owns requests end to end, imports the pages of their prompts, draws their tokens."""

from decode.config import DecodeConfig
from decode.peers import PeerLink
from decode.worker import DecodeWorker

__all__ = ["DecodeConfig", "DecodeWorker", "PeerLink"]
