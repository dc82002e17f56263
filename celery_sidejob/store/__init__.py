"""All the SQL. A function is one statement and one promise; it runs in the transaction of its executor."""

from ..model import libpq

libpq.require()  # before any module here imports psycopg: psycopg's own error does not say what to do
