"""Methods of Celery, kombu and py-amqp that are replaced: a file for each subject, a test for each method."""
