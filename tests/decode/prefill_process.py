"""A real prefill worker in a process of its own: prints its address, runs until its standard input ends."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from connector import ConnectorConfig
from engine import EngineConfig
from prefill import PrefillConfig, PrefillWorker


async def main(name: str, model_path: str, settings: bytes) -> None:
    changed = msgspec.json.decode(settings)
    worker = PrefillWorker(
        PrefillConfig(
            name=name,
            host="127.0.0.1",
            model_path=model_path,
            engine=msgspec.convert(changed.get("engine", {}), EngineConfig),
            connector=msgspec.convert(changed.get("connector", {}), ConnectorConfig),
            token=changed.get("token", "secret"),
        )
    )
    address = await worker.start()
    print(msgspec.json.encode(address).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await worker.stop(5.0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3].encode()))
