"""Bodies of `async def`, which wait for an answer from elsewhere. docs/coroutines.md explains them.

createdb answers                                 # or name yours in DATABASE_URL
celery -A answers sidejob db upgrade
celery -A answers worker --pool=asyncio --concurrency=1000

python answers.py why how who                    # in another shell; prints the answers
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence

from celery import Celery, Task, group
from celery.result import AsyncResult
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine

from celery_sidejob import RunningJob, SideJob

SERVER = os.environ.get("DATABASE_URL", "postgresql:///answers").partition("://")[2]

app = Celery("answers", broker="sidejobpg://", backend="sidejobpg://")
app.conf.sidejob_database_url = f"postgresql://{SERVER}"
sidejob = SideJob(app)


async def answer_of(question: str) -> str:
    """Ask a service that takes its time."""
    await asyncio.sleep(1)
    return f"{question}? because"


@app.task(bind=True, autoretry_for=(ConnectionError,), soft_time_limit=30)
async def ask(self: Task, question: str) -> str:
    async with asyncio.timeout(10):
        return await answer_of(question)


@app.task(durable=True, on_lost="requeue")
async def ask_for_sure(question: str) -> str:
    return await answer_of(question)


@sidejob.task(inports=["questions"], outports=["answers"])
async def survey(job: RunningJob) -> None:
    async for question in job.aio.for_inputs("questions"):
        answer = await job.aio.step("ask", answer_of, question)
        await job.output("answers").aio.write(answer)


async def ask_together(session: AsyncSession, questions: Sequence[str]) -> list[AsyncResult]:
    """Ask all questions, or none if the transaction is rolled back."""
    asked = [await ask_for_sure.aapply_async((question,), transaction=session) for question in questions]
    await session.commit()
    return asked


async def main(*questions: str) -> None:
    """Ask the questions in each way, and print the answers."""
    print(await group(ask.s(question) for question in questions)().aget(timeout=30))
    engine = create_async_engine(f"postgresql+psycopg://{SERVER}")
    async with AsyncSession(engine) as session:
        asked = await ask_together(session, questions)
    await engine.dispose()
    print([await result.aget(timeout=30) for result in asked])
    job = await survey.aenqueue()
    await job.input("questions").aio.write_many(questions)
    while await job.output("answers").aio.count() < len(questions):
        await job.aio.wait(timeout=30)
    print([answer async for answer in job.output("answers").aio])


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
