"""Asking a gateway how it is."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request


def probe(url: str, timeout_s: float = 5.0) -> tuple[int | None, str]:
    """The HTTP status and body of a GET, or None and the reason when nobody answered."""
    # Never through a proxy: it is our own gateway.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=timeout_s) as response:
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        return None, str(error)
