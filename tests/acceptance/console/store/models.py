"""Users of the project's own, and a log whose names are those of the admin's."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.base_user import AbstractBaseUser, BaseUserManager
from django.contrib.auth.models import PermissionsMixin
from django.db import models


class User(AbstractBaseUser, PermissionsMixin):
    """A user who is staff or not is not in this table."""

    email = models.EmailField(unique=True)
    is_active = models.BooleanField(default=True)
    objects: Any = BaseUserManager()
    USERNAME_FIELD = "email"


class LogEntry(models.Model):
    """What a user did."""

    user = models.ForeignKey(User, models.CASCADE)
    text = models.TextField()

    def __str__(self) -> str:
        return self.text


class Token:
    """A backend that knows no passwords."""

    def authenticate(self, request: Any, token: str = "") -> None:
        return None
