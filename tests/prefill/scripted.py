"""An engine that computes when a test says so, over real blocks."""

from __future__ import annotations

from collections import Counter

from connector import EngineId, build_geometry
from connector.pages import GroupSpec, PoolGeometry
from engine import EngineError, EngineRequest, Failed, Token
from engine.blocks import BlockTable
from tests.block_pool import full_pool

GROUP = GroupSpec(name="full", layers=(0,), num_kv_heads=1, key_dim=2, value_dim=2, itemsize=4)
CONSUMER = EngineId("decode-0", 1)
PRODUCER = EngineId("prefill-0", 2)
PROMPT = [5, 6, 7]


class FakeEngine:
    """Holds submitted requests until the test says what becomes of them. Blocks are real."""

    def __init__(self) -> None:
        self.blocks = full_pool(4, 2)
        self.geometry: PoolGeometry = build_geometry([GROUP], layout="BLHNC", block_size=2, num_blocks={"full": 4})
        self.max_model_len = 8
        self.refuses: EngineError | None = None
        self.submitted: dict[str, EngineRequest] = {}
        self.calls: Counter[str] = Counter()

    def submit(self, request: EngineRequest) -> None:
        if self.refuses is not None:
            raise self.refuses
        request.table = self.blocks.allocate(request.request_id, len(request.prompt_token_ids))
        self.submitted[request.request_id] = request

    def abort(self, request_id: str) -> None:
        self.calls["abort"] += 1
        request = self.submitted.pop(request_id, None)
        if request is not None:
            assert request.table is not None
            self.blocks.free(request.table)

    def free(self, table: object) -> None:
        self.calls["free"] += 1
        self.blocks.free(table)  # type: ignore[arg-type]

    def lend(self, table: BlockTable) -> None:
        self.blocks.lend(table)

    def returned(self, table: BlockTable) -> None:
        self.blocks.returned(table)

    def compute(self, request_id: str, num_tokens: int) -> None:
        """A step has written the KV of the first tokens into the one layer's pages."""
        request = self.submitted[request_id]
        assert request.on_layer is not None
        assert request.table is not None
        request.on_layer(request.table, 0, num_tokens)

    def finish(self, request_id: str) -> None:
        """The first token has been drawn: the blocks are the caller's from here on, if it wants them."""
        request = self.submitted.pop(request_id)
        if not request.retain:
            assert request.table is not None
            self.blocks.free(request.table)
        request.sink(Token(token_id=9, logprob=-0.5, position=3, finish="length", prompt_tokens_computed=3))

    def fail(self, request_id: str) -> None:
        request = self.submitted.pop(request_id)
        assert request.table is not None
        self.blocks.free(request.table)
        request.table = None
        request.sink(Failed(message="a step failed"))
