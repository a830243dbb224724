"""Zeroes pages before they are read for the first time: stale bits may be NaN, which no mask keeps out of attention."""
