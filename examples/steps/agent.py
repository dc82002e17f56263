"""An agent: a model that may use tools, a person who allows the dangerous ones, and words that are told as they come.

python agent.py ask "How warm is it? Then delete old.txt"
python agent.py listen 1                         # prints the words of job 1
python agent.py allow 1                          # or: refuse
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

from sqlalchemy import text
from steps import engine, sidejob

from celery_sidejob import RunningJob

TABLE = "CREATE TABLE IF NOT EXISTS used (id serial PRIMARY KEY, tool text NOT NULL, what text NOT NULL)"
DANGEROUS = {"delete"}


@sidejob.task(name="agent.answer", inports=["approvals"])
def answer(job: RunningJob, question: str) -> str:
    """Ask the model until it answers; each of its replies is paid once, and each tool is used once."""
    messages = [{"role": "user", "content": question}]
    while True:
        reply = job.step("model", think, job.id, messages)  # its record is found by the number of the call: model#2 …
        if "tool" not in reply:
            return str(reply["text"])
        tool, what = reply["tool"], reply["what"]
        if tool in DANGEROUS and job.receive("approvals", timeout=timedelta(days=1)) is not True:
            result = "this was not allowed"
        else:
            result = use(job, tool, what)
        messages += [{"role": "assistant", **reply}, {"role": "tool", "content": result}]


def use(job: RunningJob, tool: str, what: str) -> str:
    """Use a tool. What it has written and the record of its step are one commit."""
    with engine.connect() as connection:
        with job.step(tool, transaction=connection) as step:
            if step.is_new:
                connection.execute(text("INSERT INTO used (tool, what) VALUES (:t, :w)"), {"t": tool, "w": what})
                step.value = {"thermometer": "it is 21 degrees", "delete": f"{what} is deleted"}[tool]
        connection.commit()
    result: str = step.value
    return result


def think(job_id: int, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Ask the model, and tell each of its words at once to whoever listens.

    What a run publishes is told after its commit. A thread without the run's context is outside of the run.
    """
    words = []
    with ThreadPoolExecutor(1) as outside:
        for word in model(messages):
            outside.submit(sidejob.publish, f"/agent/{job_id}", word)
            words.append(word)
    if words[0] == "use":
        return {"tool": words[1], "what": words[2]}
    return {"text": " ".join(words)}


def model(messages: list[dict[str, Any]]) -> Iterator[str]:
    """Stand for a language model: uses two tools, and then says what came of it."""
    results = [message["content"] for message in messages if message["role"] == "tool"]
    yield from (("use", "thermometer", "here"), ("use", "delete", "old.txt"), ("done:", *results))[len(results)]


def main(what: str, argument: str) -> None:
    """Do what the command line says."""
    if what == "ask":
        with engine.begin() as connection:
            connection.execute(text(TABLE))
        print("job", answer.enqueue((argument,)).id)
    elif what == "listen":
        with sidejob.subscribe(f"/agent/{argument}") as announcements:
            for announcement in announcements:
                print(announcement.message, flush=True)
    else:
        sidejob.get(int(argument)).input("approvals").write(what == "allow")


if __name__ == "__main__":
    main(*sys.argv[1:])
