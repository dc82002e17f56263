"""The words whose meaning a page shows in a tooltip; docs/glossary.md says the same."""

from __future__ import annotations

from ..model.status import Status

WORDS = {
    "batch": "A set of jobs and durable tasks. It has its own progress, and can make a call when all its members "
    "have ended.",
    "capacity pool": "A number of slots that calls share. A call that finds no free slot is refused, or waits.",
    "channel": "A name such as /orders/new under which messages are published, by an output port or by "
    "sidejob.publish(). Each message is written to every input port that subscribes to the "
    "channel. Not the same as a channel of kombu.",
    "dead set": "The list of work that needs a person: jobs that failed, and durable tasks that failed, were "
    "lost, expired or were revoked. An entry can be retried or deleted.",
    "durable task": "An ordinary Celery task with durable=True. Its message is a row in Postgres until the "
    "task has ended successfully or is in the dead set.",
    "failure group": "The name under which similar failures are counted in the dead set: the class of the "
    "exception, or the group that a JobFailed names.",
    "gate": "The place in front of a managed queue. Messages wait there until the order, the limit and the rate of "
    "the queue let them through.",
    "job": "A row in Postgres with a task, arguments, state, ports, timers and children. The task runs many times "
    "over the job's life, which may last months.",
    "packet": "One value on a port, with its context and options.",
    "port": "A job's mailbox. Packets wait on an input port until a run reads them, and on an output port until the "
    "job's parent or a client reads them.",
    "run": "One execution of a job's task, or of a durable task. A run begins with a claim, and ends with a commit "
    "or is lost.",
    "schedule": "A row in Postgres with times. At each time it makes a job, or a message of a durable task.",
    "state": "The JSON values that you keep on a job with job.set().",
    "step": "A part of a body that is done once: job.step, job.call, job.sleep, job.receive. Its effects and its "
    "record are one commit, and later runs of the same asking go on behind it.",
    "timer": "A moment at which a job will be asked to run: job.run(eta=…), job.run(countdown=3600). Postgres keeps "
    "the timer.",
}
STATUSES = {
    Status.QUEUED: "A run is owed: it begins when a worker is free and nothing holds it back.",
    Status.RUNNING: "A worker runs it now.",
    Status.SUSPENDED: "Its last run has ended, and it waits to be asked again: by a packet, a child or a timer.",
    Status.COMPLETED: "Its last run has ended well.",
    Status.FAILED: "Its last run has failed for good. It is in the dead set until somebody retries or deletes it.",
    Status.TERMINATING: "Its shutdown is asked for, and has not run yet.",
    Status.TERMINATED: "It was shut down. Only a forced run revives it.",
}
REASONS = {
    "dependencies": "other jobs that it depends on have not completed",
    "timer": "its time has not come",
    "retry": "its last run failed, and the wait before the next try is not over",
    "pause": "its queue is paused",
    "limit": "as many runs of its queue are in progress as the queue's limit allows",
    "rate": "runs begin no faster than its rate, or that of its queue, allows",
    "pool": "its capacity pool has no free slot",
    "room": "a port that it writes to is full until its reader makes room",
    "no worker": "no live worker of its queue knows its task",
}
SAID = {
    "asked": "It was asked to run.",
    "terminate": "Its shutdown was asked for.",
    "deleted": "It was deleted.",
    "forked": "This is the fork.",
    "changed": "It was changed.",
    "written": "The packet was written.",
    "retried": "It is tried again.",
    "revoked": "It is revoked: it does not begin, or not again.",
    "paused": "It is paused.",
    "resumed": "It goes on.",
    "made": "One more was made now.",
}
"""What a page says after an action, by the parameter `said` of its URL."""
