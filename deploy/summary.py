"""What a person reads when the cluster is ready: where it is, how pages travel, and a request to paste."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deploy.cluster import Started
    from deploy.creation import Run


def summarise(run: Run, started: Started) -> str:
    """The summary as lines."""
    rows = [("model", f"{run.model.served_name} ({run.settings.engine.dtype}), {run.model.path}")]
    rows += [
        (role, ", ".join(worker.name for worker in started.workers if worker.role == role))
        for role in ("prefill", "decode")
    ]
    rows += [
        ("pages", f"{link.prefill} → {link.decode}: {link.transport}, {link.gb_per_s:.1f} GB/s measured")
        for link in started.links
    ]
    rows.append(("logs", str(run.logs)))
    urls = " ".join(gateway.url for gateway in started.gateways)
    body = json.dumps(
        {
            "model": run.model.served_name,
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "temperature": 0,
            "max_tokens": 32,
        }
    )
    return "\n".join(
        [
            "",
            f"KVFerry is ready: {urls}",
            *(f"  {label:<8} {text}" for label, text in rows),
            "",
            f"curl {started.gateways[0].url}/v1/chat/completions -H 'content-type: application/json' \\",
            f"  -d {shlex.quote(body)}",
            "",
        ]
    )
