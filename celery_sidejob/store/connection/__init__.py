"""Our own connections to Postgres: few, short-lived, safe across forks, with no session state.

At most one transaction per thread is open at a time and none while user code runs, so a pool child needs one
connection. A connection that was idle for `IDLE_S` is closed. A worker's services share a connection (`take_turns`);
its heartbeat has its own (`Connections.talking`).

Any connection may lead through a proxy that gives each transaction another session (PgBouncer in transaction mode). No
state is therefore kept in a session: only SET LOCAL, no temporary tables, no LISTEN. Only if the server that answered
the connect also answers the statements, statements are prepared, each with one plan for all parameters, and the session
gets the settings that our statements need (`own_executor.py`).
"""
