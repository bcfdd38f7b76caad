"""For runserver and any WSGI server; the shop, unless DJANGO_SETTINGS_MODULE says."""

from __future__ import annotations

import os

from django.core.wsgi import get_wsgi_application

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.shop")
application = get_wsgi_application()
