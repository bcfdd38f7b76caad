"""Where the console is: on Django's own site."""

from __future__ import annotations

from django.contrib import admin
from django.urls import path

from .web import SITE

urlpatterns = [path(f"{SITE}/", admin.site.urls)]
