"""Every Celery extension point, by subject. Nothing below this layer imports Celery."""
