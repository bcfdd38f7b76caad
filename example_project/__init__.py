"""Two services over one code base: a shop that takes orders, and the billing that invoices them."""

from __future__ import annotations

from .celery import app as celery_app

__all__ = ["celery_app"]
