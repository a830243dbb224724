"""To come."""


def needs_kv_cache_zeroing(groups):
    return True
