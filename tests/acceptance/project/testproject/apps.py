from __future__ import annotations

from django.apps import AppConfig


class TestProject(AppConfig):
    name = "testproject"

    def ready(self) -> None:
        from . import points

        points.arm()
