"""Benchmarks: ``make bench``, or some by name, ``make bench ARGS=publish`` (README.md).

Not part of the suite: ``python -m benchmarks.<name>`` of ``batches``, ``delays``, ``pages``,
``poison``, ``profile``.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
