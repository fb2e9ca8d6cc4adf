"""Opponents of the benchmarks: each in an environment of its own, or written again from its description."""
