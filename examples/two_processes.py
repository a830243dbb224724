"""Two processes exchange KV pages through KVFerry's connector, without its engine: python examples/two_processes.py

The child holds a page pool as a prefill engine would; the parent reads three of its blocks as a decode engine would.
"""

import asyncio
import multiprocessing
from multiprocessing.connection import Connection

import connector as kv

GROUP = kv.GroupSpec(name="full", layers=(0, 1), num_kv_heads=2, key_dim=64, value_dim=64, itemsize=2)
GEOMETRY = kv.build_geometry([GROUP], layout="BLHNC", block_size=16, num_blocks={"full": 8})
BLOCK = GEOMETRY.region_bytes[0] // 8
ALIKE = kv.CompatibilityRecord(
    model_fingerprint="mine", dtype="bfloat16", cache_dtype="bfloat16", layout="BLHNC", block_size=16, groups=(GROUP,)
)


def worker(name: str, pool: kv.PoolMemory) -> kv.Connector:
    """The connector of a worker over its page pool of 8 blocks."""
    return kv.Connector(kv.ConnectorConfig(), kv.new_engine_id(name), pool.memory, GEOMETRY, ALIKE, b"our secret")


async def prefill(pipe: Connection) -> None:
    """Compute a prompt of 40 tokens into blocks 5, 2 and 7, and hold them until they have been fetched."""
    pool = kv.PoolMemory(GEOMETRY.region_bytes[0])
    connector = worker("prefill", pool)
    pipe.send((connector.engine_id, await connector.start()))
    transfer_id, consumer = await asyncio.to_thread(pipe.recv)
    released = asyncio.Event()
    connector.sources.open(transfer_id, consumer, lambda end: released.set())
    for block in (5, 2, 7):
        pool.bytes[block * BLOCK : (block + 1) * BLOCK] = bytes([block]) * BLOCK
    pipe.send(connector.sources.hold(transfer_id, {"full": [5, 2, 7]}, num_tokens=40))
    await released.wait()
    await connector.close()


async def decode(pipe: Connection) -> None:
    """Read them into blocks 0, 1 and 2."""
    pool = kv.PoolMemory(GEOMETRY.region_bytes[0])
    connector = worker("decode", pool)
    await connector.start()
    link = await connector.connect(*pipe.recv())
    pull = connector.begin(link, kv.new_transfer_id())
    pipe.send((pull.transfer_id, connector.engine_id))
    imported = await pull.read(pipe.recv(), {"full": [0, 1, 2]}, on_settled=lambda outcome: None)
    print(f"{imported.num_tokens} tokens by {imported.transport}:", list(pool.bytes[: 3 * BLOCK : BLOCK]))
    await connector.close()


if __name__ == "__main__":
    ours, theirs = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=lambda: asyncio.run(prefill(theirs)))
    child.start()
    asyncio.run(decode(ours))
    child.join()
