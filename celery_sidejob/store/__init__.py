"""All the SQL. A function is one statement and one promise; it runs in the transaction of its executor."""

from ..model import libpq

libpq.require()  # before any module in here imports psycopg, whose own error says what it tried, and not what to do
