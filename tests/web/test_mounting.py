"""The page in other applications: ASGI below a path, WSGI, and Django behind the admin's login; and the command."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.routing import Mount

from celery_sidejob import CapacityPool, RunningJob
from celery_sidejob.web import asgi_app, wsgi_app
from celery_sidejob.web.pages import READING
from celery_sidejob.web.users import COOKIE
from tests.tools.browsers import ENTRIES, PASSWORDS, Browser
from tests.tools.commands import ask
from tests.tools.in_process import Stage
from tests.tools.links import Found, unread, walk

ROOT = Path(__file__).parents[2]


@pytest.fixture
def with_users(database_url: str) -> Iterator[Stage]:
    """A stage whose app names the users of its page."""
    stage = Stage(database_url, sidejob_web_users=ENTRIES, sidejob_web_secret="s" * 32)
    yield stage
    stage.close()


def send(to: str) -> None:
    pass


def fail(job: RunningJob) -> None:
    raise ValueError("no such order")


def furnish(stage: Stage) -> None:
    """Make a row of everything that has a page or a form."""
    job = stage.job(inports={"orders": {"channels": ["/orders"]}}, outports=["bills"], tags=["vip"])
    job.enqueue(stage.idle, child_name="below")
    stage.job(depends_on=[job])
    for body in (fail, lambda job: job.step("reserve", lambda: 2) and job.suspend()):
        hold = stage.claim(stage.job(body))
        assert hold is not None
        stage.perform(hold)
    durable = stage.app.task(durable=True, name="stage.send", shared=False)(send)
    durable.apply_async(("ann",), countdown=3600)
    with stage.sidejob.batch("import 7"):
        stage.job()
    stage.sidejob.queue("mail").pause("on fire")
    stage.sidejob.schedule("nightly", stage.idle, every=timedelta(hours=6))
    CapacityPool("printers", 4).apply_async(stage.idle)
    stage.claim(stage.job(queue="celery2"))


def in_starlette(sidejob: Any) -> Any:
    return Browser(Starlette(routes=[Mount("/admin/jobs", asgi_app(sidejob))]), base_url="https://page.example")


def in_fastapi(sidejob: Any) -> Any:
    api = FastAPI()
    api.mount("/admin/jobs", asgi_app(sidejob))
    return Browser(api, base_url="https://page.example")


def below_a_root_path(sidejob: Any) -> Any:
    """A server that has a root path, as `uvicorn --root-path`, tells of it beside the whole path."""
    outer = Starlette(routes=[Mount("/jobs", asgi_app(sidejob))])

    async def server(scope: Any, receive: Any, send: Any) -> None:
        await outer({**scope, "root_path": "/admin"} if scope["type"] == "http" else scope, receive, send)

    return Browser(server, base_url="https://page.example")


def in_wsgi(sidejob: Any) -> Any:
    def dispatch(environ: Any, start: Any) -> Any:
        assert environ["PATH_INFO"].startswith("/admin/jobs")
        path = environ["PATH_INFO"].removeprefix("/admin/jobs")
        return app({**environ, "SCRIPT_NAME": "/admin/jobs", "PATH_INFO": path}, start)

    app = wsgi_app(sidejob)
    return httpx.Client(transport=httpx.WSGITransport(dispatch), base_url="https://page.example")


WAYS = {"Starlette": in_starlette, "FastAPI": in_fastapi, "a root path": below_a_root_path, "WSGI": in_wsgi}


@pytest.mark.parametrize("way", WAYS)
def test_below_a_path_every_link_form_and_redirect_stays_below_it(with_users: Stage, way: str) -> None:
    furnish(with_users)
    with WAYS[way](with_users.sidejob) as browser:
        browser.follow_redirects = False

        def ask(method: str, path: str, fields: Mapping[str, str]) -> Found:
            found = browser.request(method, path, **({"data": fields} if method == "POST" else {}))
            return Found(found.status_code, found.headers.get("location"), found.text)

        assert browser.get("/admin/jobs/jobs").headers["location"] == "/admin/jobs/login?next=/jobs"
        found = browser.post("/admin/jobs/login?next=/jobs", data={"name": "ann", "password": PASSWORDS["ann"]})
        assert found.headers["location"] == "/admin/jobs/jobs"
        assert "Path=/admin/jobs;" in found.headers["set-cookie"]
        assert 'href="/admin/jobs/jobs" aria-current="page"' in browser.get("/admin/jobs/jobs").text
        seen, led_to = walk(ask, "/admin/jobs")
    assert unread((entry.path for entry in READING), seen, "/admin/jobs") == []
    assert len([place for place in led_to if place]) >= 10
    assert any("/live/" in path for path in seen) == (way != "WSGI")


def test_as_a_wsgi_application(with_users: Stage) -> None:
    transport = httpx.WSGITransport(wsgi_app(with_users.sidejob))
    with httpx.Client(transport=transport, base_url="https://page.example") as browser:
        assert browser.get("/healthz").text == "ok\n"
        assert browser.get("/").status_code == 303
        found = browser.post("/login", data={"name": "ron", "password": PASSWORDS["ron"]})
        assert found.status_code == 303
        assert "There are no jobs." in browser.get("/jobs").text


def run_program(text: str, directory: Path, stage: Stage) -> subprocess.CompletedProcess[str]:
    """Run a program in a process of its own, with the URL of the stage's database."""
    program = directory / "program.py"
    program.write_text(text)
    return subprocess.run(
        [sys.executable, program, stage.database_url], cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=False, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


FORKS = """
import os, signal, sys
import httpx
from celery import Celery
from celery_sidejob import SideJob
from celery_sidejob.web import wsgi_app
app = Celery(broker="memory://")
app.conf.sidejob_database_url = sys.argv[1]
page = wsgi_app(SideJob(app), lambda request: ("ann", "read"))
def ask():
    with httpx.Client(transport=httpx.WSGITransport(page), base_url="https://page.example") as browser:
        return browser.get("/jobs").status_code
assert ask() == 200
if os.fork() == 0:
    signal.alarm(60)
    os._exit(0 if ask() == 200 else 1)
print(os.waitstatus_to_exitcode(os.wait()[1]), ask())
"""


def test_a_wsgi_application_is_served_before_and_after_a_fork(stage: Stage, tmp_path: Path) -> None:
    done = run_program(FORKS, tmp_path, stage)
    assert (done.returncode, done.stdout) == (0, "0 200\n"), done.stderr


def test_processes_with_one_secret_take_each_others_forms(stage: Stage) -> None:
    def process(secret: str) -> httpx.Client:
        app = wsgi_app(stage.sidejob, lambda request: ("ann", "operate"), secret=secret)
        return httpx.Client(transport=httpx.WSGITransport(app), base_url="https://page.example")

    path = f"/jobs/{stage.job().id}"
    with process("s" * 32) as one, process("s" * 32) as other, process("t" * 32) as stranger:
        (token,) = set(re.findall(r'name="token" value="(\w+)"', one.get(path).text))
        assert stranger.post(f"{path}/priority", data={"token": token, "priority": "7"}).status_code == 403
        assert other.post(f"{path}/priority", data={"token": token, "priority": "7"}).status_code == 303


DJANGO = """
import sys, django
from urllib.parse import urlencode
from django.conf import settings
settings.configure(
    SECRET_KEY="k" * 50, ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=["django.contrib.admin", "django.contrib.auth", "django.contrib.contenttypes",
                    "django.contrib.sessions", "django.contrib.messages"],
    MIDDLEWARE=["django.contrib.sessions.middleware.SessionMiddleware", "django.middleware.csrf.CsrfViewMiddleware",
                "django.contrib.auth.middleware.AuthenticationMiddleware"],
    TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates", "APP_DIRS": True}],
    DEFAULT_AUTO_FIELD="django.db.models.AutoField",
)
django.setup()
from celery import Celery
from celery_sidejob import SideJob
from celery_sidejob.web import django_urls
from django.contrib import admin
from django.core.management import call_command
from django.test import Client
from django.urls import include, path
app = Celery("stage", broker="memory://")
app.conf.sidejob_database_url = sys.argv[1]
sidejob = SideJob(app)
urlpatterns = [path("admin/", admin.site.urls), path("sidejob/", include(django_urls(sidejob)))]
call_command("migrate", verbosity=0)
from django.contrib.auth.models import User
User.objects.create_user("customer", password="c")
User.objects.create_user("ron", password="r", is_staff=True)
User.objects.create_superuser("ann", password="a")
for name, password in ((None, None), ("customer", "c"), ("ron", "r"), ("ann", "a")):
    client = Client()
    if name:
        assert client.login(username=name, password=password)
    found = client.get("/sidejob/jobs?status=queued")
    page, headers = found.content.decode(), found.headers
    role = "May read and operate" in page, "May read" in page
    print(name, found.status_code, headers.get("Location", "-"), *role, "content-security-policy" in headers)
    if name == "ron":
        print(*(client.get(f"/sidejob/{rest}").status_code for rest in ("static/style.css", "", "nothing")))
        print('href="/sidejob/dead"' in page)

from celery_sidejob.web.pages import READING
from tests.tools.links import Found, unread, walk
def ask(method, path, fields):
    assert path.startswith("/outer/")
    found = client.generic(method, path.removeprefix("/outer"), urlencode(fields),
                           "application/x-www-form-urlencoded", SCRIPT_NAME="/outer")
    return Found(found.status_code, found.headers.get("Location"), found.content.decode())
seen, led_to = walk(ask, "/outer/sidejob")
print(unread((entry.path for entry in READING), seen, "/outer/sidejob"))
print(len([place for place in led_to if place]) >= 10, any("/live/" in path for path in seen))
"""


def test_in_django_it_stands_behind_the_admins_login(stage: Stage, tmp_path: Path) -> None:
    furnish(stage)
    done = run_program(DJANGO, tmp_path, stage)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "None 302 /admin/login/?next=/sidejob/jobs%3Fstatus%3Dqueued False False False",
        "customer 302 /admin/login/?next=/sidejob/jobs%3Fstatus%3Dqueued False False False",
        "ron 200 - False True True",
        "200 200 404",
        "True",
        "ann 200 - True True True",
        "[]",
        "True False",
    ]


@contextmanager
def served(app: str, *words: str, **environ: str) -> Iterator[tuple[str, str]]:
    """Serve the page of an app on a free port: the address, and what the command said before."""
    command = [sys.executable, "-m", "celery", "-A", app, "sidejob", "web", "--port", "0", *words]
    with subprocess.Popen(
        command, cwd=ROOT, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT), **environ}
    ) as process:
        said = ""
        try:
            assert process.stderr is not None
            for line in process.stderr:
                said += line
                if found := re.search(r"http://\S+", line):
                    yield found[0], said
                    break
            else:
                raise AssertionError(said)
        finally:
            process.terminate()
            process.wait(30)


def test_the_command_with_a_password_of_its_own(stage: Stage) -> None:
    with served("tests.web.page_app", SIDEJOB_DATABASE_URL=stage.database_url) as (address, said):
        (password,) = re.findall(r"log in as admin with (\S+)", said)
        assert httpx.get(f"{address}healthz").text == "ok\n"
        assert httpx.get(address).status_code == 303
        found = httpx.post(f"{address}login", data={"name": "admin", "password": password})
        cookie = {"cookie": f"{COOKIE}={found.cookies[COOKIE]}"}
        page = httpx.get(address, headers=cookie)
        assert page.status_code == 200
        assert "May read and operate" in page.text
        assert "server" not in page.headers


def test_without_users_it_listens_on_this_machine_only(stage: Stage) -> None:
    for host in ("0.0.0.0", "::", "192.0.2.7", "page.example"):
        said = ask(stage.app, "web", "--host", host)
        assert said.code == 1
        assert "sidejob_web_users is not set" in said.err


def test_a_port_that_is_taken_is_said(stage: Stage) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        said = ask(stage.app, "web", "--port", taken.getsockname()[1])
    assert said.code == 1
    assert "Address already in use" in said.err
    assert "--port" in said.err


def test_an_entry_for_a_user(stage: Stage) -> None:
    said = ask(stage.app, "web", "user", "eve", "--role", "operate", "--password", "a long one")
    name, entry = eval(f"{{{said.out}}}").popitem()  # it is meant to be pasted
    assert name == "eve"
    assert "a long one" not in said.out
    users: dict[str, Any] = {name: entry}
    from celery_sidejob.web.users import Role, Users

    found = Users(users).log_in("eve", "a long one", "here")
    assert found is not None
    assert found.role == Role.OPERATE
