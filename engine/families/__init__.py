"""The model families that the engine serves: one allowlist, from which docs/models.md is generated."""
