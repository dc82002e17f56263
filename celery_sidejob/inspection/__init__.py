"""Read-only views for commands and dashboards. The running side never imports this.

All results may be shown: `sidejob_redact` was applied to arguments, aliases, state, ports' defaults, errors and
tracebacks, as in `Job.info`.
"""
