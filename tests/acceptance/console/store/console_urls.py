from django.contrib.admin import AdminSite
from django.contrib.auth.forms import AuthenticationForm
from django.http import HttpRequest
from django.urls import path

from django_amqp_events.admin import register


class Console(AdminSite):
    site_header = site_title = "Events"
    login_form = AuthenticationForm  # the admin's own asks for is_staff

    def has_permission(self, request: HttpRequest) -> bool:
        user = request.user
        return user.is_active and user.has_perm("django_amqp_events.view_dashboard")


site = Console(name="console")
register(site)
urlpatterns = [path("", site.urls)]
