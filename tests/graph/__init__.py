"""The life of jobs and their families on a real Postgres, compared step by step with a plain model in memory."""
