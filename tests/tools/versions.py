"""What needs newer versions than the oldest that are supported: `./run versions oldest` leaves these tests out."""

from __future__ import annotations

import celery
import kombu
import pytest

CELERY_5_7 = pytest.mark.skipif(celery.VERSION[:2] < (5, 7), reason="is about what Celery 5.7 does")
KOMBU_5_7 = pytest.mark.skipif(kombu.VERSION[:2] < (5, 7), reason="sidejob:// needs kombu 5.7")
