"""Our own connections to Postgres: few, short-lived, safe across forks, with no session state.

At most one transaction per thread is open at a time and none while user code runs, so a pool child needs one
connection. A connection that was idle for `IDLE_S` is closed. A worker's services take turns on one (`take_turns`),
its heartbeat has one of its own (`Connections.talking`).

Any of them may lead through a proxy that gives each transaction another session (PgBouncer in transaction mode). No
state is therefore kept in a session: only SET LOCAL, no temporary tables, no LISTEN. Only if the server that answered
the connect also answers statements, are statements prepared, each with one plan for all parameters, and a session gets
what our statements need (`session.py`).
"""
