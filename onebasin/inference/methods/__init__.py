"""Inference methods, one per file."""
