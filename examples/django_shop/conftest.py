"""For pytest-django: what `shop.testing` does for `manage.py test`."""

import pytest
from django.conf import settings
from django.db import connection
from shop.celery import sidejob
from shop.testing import url_of


@pytest.fixture(scope="session")
def django_db_setup(django_db_setup, django_db_blocker):
    """Make Django's test database the store as well, and have jobs run in the process that asks for them."""
    with django_db_blocker.unblock():
        settings.CELERY_SIDEJOB_DATABASE_URL = url_of(connection.settings_dict)
        settings.CELERY_BROKER_URL = "memory://"
        settings.CELERY_TASK_ALWAYS_EAGER = True
        settings.CELERY_TASK_STORE_EAGER_RESULT = True
        sidejob.upgrade_schema()
    yield
    sidejob.close()
