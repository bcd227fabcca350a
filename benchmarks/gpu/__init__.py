"""Benchmarks that need a GPU: `run.py` runs the cases beside it and prints one short table."""
