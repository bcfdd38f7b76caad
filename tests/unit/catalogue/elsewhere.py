"""A contract whose hints have a meaning in this module only."""

from __future__ import annotations

from typing import Literal

Weight = Literal[3]


def contract(weight: Weight) -> None: ...
