"""What needs newer versions than the oldest that are supported: `./run versions oldest` leaves these tests out."""

from __future__ import annotations

import celery
import kombu
import pytest
from sqlalchemy.orm import scoped_session

CELERY_5_7 = pytest.mark.skipif(celery.VERSION[:2] < (5, 7), reason="is about what Celery 5.7 does")
KOMBU_5_7 = pytest.mark.skipif(kombu.VERSION[:2] < (5, 7), reason="sidejob:// and sidejobpg:// need kombu 5.7")
SQLALCHEMY_2_0_22 = pytest.mark.skipif(
    not hasattr(scoped_session, "get_one"), reason="is about code that calls get_one"
)
