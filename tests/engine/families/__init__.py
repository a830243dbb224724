"""Tests of `engine.families`."""
