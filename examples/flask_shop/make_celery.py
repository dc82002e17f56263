"""What `celery -A make_celery …` imports: the app that the factory has made."""

from shop import create_app

flask_app = create_app()
celery_app = flask_app.extensions["celery"]
