"""A small shop: an order and the job that fulfils it are one transaction. The application's factory."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from celery import Celery, Task
from flask import Flask

from celery_sidejob import SideJob

from . import models, views


def create_app(config: Mapping[str, Any] | None = None) -> Flask:
    """Make the application; `config` goes before the environment."""
    app = Flask(__name__)
    database_url = os.environ.get("DATABASE_URL", "postgresql:///flask_shop")
    app.config.from_mapping(
        DATABASE_URL=database_url,
        CELERY={
            "sidejob_database_url": database_url,
            "broker_url": os.environ.get("CELERY_BROKER_URL", "sidejobpg://"),  # alone: the database above
            "result_backend": "sidejobpg://",
            "broker_connection_retry_on_startup": True,
        },
    )
    app.config.from_mapping(config)
    models.init_app(app)
    celery_init_app(app)
    app.register_blueprint(views.blueprint)
    return app


def celery_init_app(app: Flask) -> Celery:
    """Make the Celery app, whose tasks run in the application's context, as Flask's documentation has it."""

    class FlaskTask(Task):  # type: ignore[misc]  # Celery has no types
        def __call__(self, *args: object, **kwargs: object) -> object:
            with app.app_context():
                return self.run(*args, **kwargs)

    celery_app = Celery("flask_shop", task_cls=FlaskTask)
    celery_app.config_from_object(app.config["CELERY"])
    celery_app.set_default()
    app.extensions["celery"] = celery_app
    app.extensions["sidejob"] = SideJob(celery_app)
    return celery_app
