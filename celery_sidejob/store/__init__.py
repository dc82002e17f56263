"""All the SQL. A function is one statement and one promise; it runs in the transaction of its executor."""
