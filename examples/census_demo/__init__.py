"""What demo.py is made of. Nobody needs this in order to use celery_sidejob: for that see code_census.py."""
