"""All the SQL. A function is one statement and one promise; it runs in whatever transaction its executor is in."""
