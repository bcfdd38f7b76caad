"""Measurements: ``make bench``, one alone by its name, ``make bench ARGS=publish`` (README.md).

Beside the suite, each alone: ``python -m benchmarks.<name>`` of ``batches``, ``delays``, ``pages``,
``poison``, ``profile``.
"""
