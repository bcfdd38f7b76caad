"""The roles that the documentation recommends."""

from __future__ import annotations

from itertools import pairwise

import pytest
from django.contrib.auth.models import Permission

from tests.roles import roles


@pytest.mark.django_db
def test_each_permission_belongs_to_a_role() -> None:
    """So a new one needs a decision."""
    of = roles()
    assert list(of) == ["viewer", "operator", "manager"]
    assert all(less < more for less, more in pairwise(of.values()))
    stored = Permission.objects.filter(content_type__app_label="django_amqp_events")
    assert of["manager"] == set(stored.values_list("codename", flat=True))
