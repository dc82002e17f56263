"""Every Celery extension point, one file each. Nothing below this layer imports Celery."""
