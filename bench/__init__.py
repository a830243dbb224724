"""Measurements: each `kvferry bench X` is a folder here. What they measured is in `docs/performance.md`."""
