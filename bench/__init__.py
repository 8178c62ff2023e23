"""Benchmarks and the simulator: ``python -m bench.NAME``."""
