"""The parts of demo.py. Your own project needs none of them: see code_census.py for how to use celery_sidejob."""
