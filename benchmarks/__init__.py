"""Measurements. Each module runs alone: ``python -m benchmarks.<name>``."""
