"""What is replaced of objects of Celery, kombu and py-amqp: a file for each method, and a test of what it relies on."""
