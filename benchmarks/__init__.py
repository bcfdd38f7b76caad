"""Benchmarks: ``make bench``, or some by name, ``make bench ARGS=publish`` (README.md).

Programs of their own: ``python -m benchmarks.<name>`` of ``capacity`` and ``pages``.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))
