from .settings import *  # noqa: F403
from .settings import INSTALLED_APPS as PROJECT_APPS

ROOT_URLCONF = "store.console_urls"
# The admin comes first, so that names which it shares with your models stay those of your models.
ADMIN_APPS = [
    "django.contrib.admin.apps.SimpleAdminConfig",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
]
INSTALLED_APPS = [*ADMIN_APPS, *(app for app in PROJECT_APPS if app not in ADMIN_APPS)]
# Only if `manage.py check` reports them: a model of yours is also called LogEntry.
SILENCED_SYSTEM_CHECKS = ["fields.E304", "fields.E305"]

AUTHENTICATION_BACKENDS = ["django.contrib.auth.backends.ModelBackend"]
CSRF_FAILURE_VIEW = "django.views.csrf.csrf_failure"
SESSION_COOKIE_NAME = "console_session"
CSRF_COOKIE_NAME = "console_csrf"
MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ]
        },
    }
]
