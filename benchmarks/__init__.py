"""Benchmarks that test our claims; run one with `python -m benchmarks.<name>`."""
