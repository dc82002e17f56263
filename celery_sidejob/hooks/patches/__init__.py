"""Methods of Celery, kombu and py-amqp that are replaced: a file for each, and a test of what it relies on."""
