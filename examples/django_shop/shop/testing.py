"""Tests of a project with durable jobs: `manage.py test` runs them on a database with both schemas."""

from urllib.parse import quote

from django.conf import settings
from django.db import connection
from django.test.runner import DiscoverRunner

from .celery import sidejob


class ShopTestRunner(DiscoverRunner):
    """Makes Django's test database the store as well, and has jobs run in the process that asks for them."""

    def setup_databases(self, **kwargs):
        """Make the test database, and sidejob's schema in it."""
        made = super().setup_databases(**kwargs)
        settings.CELERY_SIDEJOB_DATABASE_URL = url_of(connection.settings_dict)
        settings.CELERY_BROKER_URL = "memory://"
        settings.CELERY_TASK_ALWAYS_EAGER = True
        settings.CELERY_TASK_STORE_EAGER_RESULT = True
        sidejob.upgrade_schema()
        return made

    def teardown_databases(self, old_config, **kwargs):
        """Drop the test database, which nobody may be connected to."""
        sidejob.close()
        super().teardown_databases(old_config, **kwargs)


def url_of(database):
    """Return the URL of one of Django's DATABASES."""
    user, password, host, port, name = (
        quote(str(database[key] or ""), safe="") for key in ("USER", "PASSWORD", "HOST", "PORT", "NAME")
    )
    return f"postgresql://{user}:{password}@{host}:{port}/{name}"
