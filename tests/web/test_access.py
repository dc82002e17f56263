"""Who gets in: logins, roles, forged sessions and forms, and what every answer says to the browser."""

from __future__ import annotations

import re
from collections.abc import Callable

import httpx
import pytest
from itsdangerous import URLSafeTimedSerializer

from celery_sidejob import SettingsError
from celery_sidejob.web import asgi_app
from celery_sidejob.web.pages import READING
from celery_sidejob.web.site import Site
from celery_sidejob.web.users import COOKIE, FAILURES, Role, Users, hashed
from tests.tools.apps import make_app
from tests.tools.browsers import ENTRIES, PASSWORDS, Browser, Program, browser_of, serving
from tests.tools.databases import SCHEMA
from tests.tools.in_process import Stage
from tests.tools.roles import a_role


def test_a_stranger_sees_only_healthz_and_the_login(stage: Stage, stranger: Browser) -> None:
    job = stage.job()
    assert stranger.get("/healthz").text == "ok\n"
    for entry in READING:
        path = entry.path.format(id=job.id, direction="in", name="a", task_id="x")
        found = stranger.get(path)
        assert found.status_code == 303, path
        assert found.headers["location"] == f"/login?next={path}"
    assert stranger.get("/nothing").status_code == 404
    assert stranger.get(f"/live/jobs/{job.id}").status_code == 403


def test_a_login_leads_on_to_the_page_that_was_asked_for(stranger: Browser) -> None:
    asked = stranger.get("/jobs?status=failed&tag=a b").headers["location"]
    found = stranger.post(asked, data={"name": "ann", "password": PASSWORDS["ann"]})
    assert found.headers["location"] == "/jobs?status=failed&tag=a%20b"
    assert stranger.get("/jobs").status_code == 200


@pytest.mark.parametrize(
    "target",
    ["https://evil.example/", "//evil.example/", "/\\evil.example", "\\\\evil.example", "javascript:alert(1)",
     "/\nSet-Cookie: a=b", "", "jobs"],
)  # fmt: skip
def test_a_login_leads_to_no_other_site(stranger: Browser, target: str) -> None:
    found = stranger.post("/login", params={"next": target}, data={"name": "ann", "password": PASSWORDS["ann"]})
    assert found.headers["location"] == "/"


def test_a_wrong_password_and_an_unknown_name_look_alike(stranger: Browser, caplog: pytest.LogCaptureFixture) -> None:
    wrong, unknown = stranger.log_in("ann", "guess"), stranger.log_in("no\nbody", "guess")
    assert wrong.status_code == unknown.status_code == 403
    assert wrong.text == unknown.text
    assert stranger.get("/").status_code == 303
    for name in ("'ann'", r"'no\nbody'"):
        assert f"A login on the web page has failed: name {name} from testclient" in caplog.messages
    assert "guess" not in caplog.text


def test_failed_logins_are_limited(stranger: Browser) -> None:
    for _ in range(FAILURES):
        assert stranger.log_in("ann", "guess").status_code == 403
    found = stranger.log_in("ann")
    assert found.status_code == 429, "even with the right password: a guess must not be told apart"
    assert int(found.headers["retry-after"]) <= 60


def test_failed_logins_from_one_address_are_limited_whatever_their_names(stranger: Browser) -> None:
    for number in range(FAILURES):
        assert stranger.log_in(f"nobody {number}", "guess").status_code == 403
    assert stranger.log_in("ann").status_code == 429


def test_the_limit_of_failed_logins_ends(stranger: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    for _ in range(FAILURES):
        stranger.log_in("ann", "guess")
    assert stranger.log_in("ann").status_code == 429
    monkeypatch.setattr("celery_sidejob.web.users.PENALTY_S", 0.0)
    assert stranger.log_in("ann").status_code == 303


def test_the_failed_logins_that_are_remembered_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("celery_sidejob.web.users.REMEMBERED", 4)
    users = Users(ENTRIES)
    for number in range(FAILURES):
        assert users.admit("ann", f"address {number}") == 0
    assert users.admit("ann", "elsewhere") > 0
    for number in range(3):
        assert users.admit(f"nobody {number}", f"another {number}") == 0
    assert users.admit("ann", "elsewhere") == 0


def test_of_many_guesses_at_once_no_more_are_tried() -> None:
    users = Users(ENTRIES)
    assert [users.admit("ann", "here") for _ in range(50)].count(0) == FAILURES


def test_whoever_knows_the_password_is_not_counted(stage: Stage) -> None:
    users = Users(ENTRIES)
    for _ in range(3 * FAILURES):
        assert users.admit("ann", "here") == 0
        assert users.log_in("ann", PASSWORDS["ann"], "here") is not None


def test_the_penalty_is_a_whole_minute_from_the_last_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr("celery_sidejob.web.users.time.monotonic", lambda: now[0])
    users = Users(ENTRIES)
    for at in (1000.0, 1001.0, 1002.0, 1003.0, 1059.0):
        now[0] = at
        assert users.admit("ann", "here") == 0
    now[0] = 1060.0
    assert users.admit("ann", "here") == 59.0
    now[0] = 1119.0
    assert users.admit("ann", "here") == 0


def test_a_look_at_the_head_of_a_page_is_no_login(stranger: Browser) -> None:
    for _ in range(FAILURES):
        assert stranger.head("/login").status_code == 200
        assert stranger.head("/jobs").headers["location"] == "/login?next=/jobs"
    assert stranger.log_in("ann").status_code == 303


def test_a_session_cookie_is_kept_from_scripts_and_other_sites(stranger: Browser) -> None:
    cookie = stranger.log_in("ann").headers["set-cookie"].lower()
    parts = {part.strip() for part in cookie.split(";")}
    assert {"secure", "httponly", "samesite=lax", "path=/", "max-age=43200"} <= parts
    assert PASSWORDS["ann"] not in cookie


def test_forged_and_outdated_sessions(site: Site, stranger: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = {"name": "ann", "mark": site.users.mark_of("ann"), "key": "0"}
    other = URLSafeTimedSerializer("another secret", salt="celery_sidejob.web session").dumps(entry)
    stranger.log_in("ron")
    good = stranger.cookies[COOKIE]
    stranger.cookies.clear()
    for forged in (other, good[:-3], good + "x", "", ".", "é", good.replace(".", "..", 1)):
        found = stranger.get("/", headers={"cookie": f"{COOKIE}={forged}".encode()})
        assert found.status_code == 303, forged
    assert stranger.get("/", headers={"cookie": f"{COOKIE}={good}"}).status_code == 200
    monkeypatch.setattr("celery_sidejob.web.users.LASTS_S", -1)
    assert stranger.get("/", headers={"cookie": f"{COOKIE}={good}"}).status_code == 303


def test_a_session_ends_with_the_password_or_the_role(stage: Stage) -> None:
    secret = "s" * 32
    with browser_of(Site(stage.sidejob, Users(ENTRIES), None, secret=secret)) as browser:
        browser.log_in("ann")
        cookie = {"cookie": f"{COOKIE}={browser.cookies[COOKIE]}"}
    for users in ({"ron": ENTRIES["ron"]}, {"ann": hashed(PASSWORDS["ann"], Role.OPERATE)},
                  {"ann": ENTRIES["ann"].replace("operate", "read")}):  # fmt: skip
        with browser_of(Site(stage.sidejob, Users(users), None, secret=secret)) as later:
            assert later.get("/", headers=cookie).status_code == 303
    with browser_of(Site(stage.sidejob, Users(ENTRIES), None, secret=secret)) as later:
        assert later.get("/", headers=cookie).status_code == 200, "another process with the same secret"


def test_logging_out(operator: Browser) -> None:
    assert operator.post("/logout", data={"token": "0" * 64}).status_code == 403
    assert operator.submit("/logout").headers["location"] == "/login"
    assert operator.get("/").status_code == 303


def test_a_login_from_another_site_is_refused(stranger: Browser) -> None:
    form = {"name": "ann", "password": PASSWORDS["ann"]}
    for headers in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"},
                    {"sec-fetch-site": "same-site"},
                    {"origin": "https://[page.example"}, {"origin": "page.example"}):  # fmt: skip
        assert stranger.post("/login", data=form, headers=headers).status_code == 403
    assert stranger.post("/login", data=form, headers={"origin": "https://page.example"}).status_code == 303


def test_every_answer_has_the_headers(stage: Stage, reader: Browser) -> None:
    for path in ("/", "/healthz", "/nothing", "/login", "/static/style.css", "/jobs/999"):
        headers = reader.get(path).headers
        policy = dict(part.strip().split(" ", 1) for part in headers["content-security-policy"].split(";"))
        assert set(policy.values()) == {"'none'", "'self'"}
        assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
        assert policy["form-action"] == "'self'", "the default does not hold for it"
        for name in ("cross-origin-opener-policy", "cross-origin-resource-policy", "referrer-policy"):
            assert headers[name] == "same-origin"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["x-frame-options"] == "DENY"
        assert ("no-store" in headers["cache-control"]) == (not path.startswith("/static/")), path


def test_only_files_may_be_kept_by_others(stage: Stage, operator: Browser, with_token: Callable[..., Program]) -> None:
    stage.job(aliases=["static"])
    assert operator.token in operator.get("/static/nothing").text
    for path in ("/static/nothing", "/jobs/static/tree"):
        assert operator.get(path).headers["cache-control"] == "no-store", path
    answer = with_token("read").ask("GET", "/jobs/static/steps")
    assert answer.status_code == 200
    assert answer.headers["cache-control"] == "no-store"


def test_behind_a_proxy_that_tells_host_and_client(site: Site) -> None:
    """As docs/web.md has it for nginx."""

    def log_in(password: str, client: str) -> int:
        told = {"host": "page.example", "origin": "https://page.example", "x-forwarded-proto": "https",
                "x-forwarded-for": client}  # fmt: skip
        form = {"name": f"of {client}" if password == "guess" else "ann", "password": password}
        return httpx.post(f"{address}/login", data=form, headers=told).status_code

    with serving(site) as address:
        assert [log_in("guess", "192.0.2.1") for _ in range(FAILURES + 1)] == [403] * FAILURES + [429]
        assert log_in(PASSWORDS["ann"], "192.0.2.1") == 429
        assert log_in(PASSWORDS["ann"], "192.0.2.2") == 303


def test_huge_forms_are_refused(stranger: Browser) -> None:
    assert stranger.post("/login", content=b"name=" + b"x" * 100_000).status_code == 413
    assert stranger.post("/login", content=b"&".join(b"a=1" for _ in range(300))).status_code == 400
    assert stranger.post("/login", content=b"name=\xff\xfe&password=\xed\xa0\x80").status_code == 403


def test_paths_lead_out_of_no_folder(reader: Browser) -> None:
    for path in ("/static/../site.py", "/static/%2e%2e/site.py", "/static/..%2fsite.py", "/static/%00", "/static/",
                 "/static/style.css%00.html", "//evil.example/", "/jobs/..%2f..%2fetc%2fpasswd"):  # fmt: skip
        assert reader.get(f"https://page.example{path}").status_code == 404, path


def test_another_site_says_who_it_is(stage: Stage) -> None:
    people = {"Bearer ann": ("ann", "operate"), "Bearer ron": ("ron", "read")}
    site = Site(stage.sidejob, Users({}), lambda request: people.get(request.headers.get("authorization", "")))
    with browser_of(site) as browser:
        assert browser.get("/").status_code == 403
        assert browser.get("/login").status_code == 404
        assert browser.post("/logout").status_code == 404
        assert ">ron</span>" in browser.get("/", headers={"authorization": "Bearer ron"}).text
        people[""] = ("al\ud800", "read")
        assert r">al\ud800</span>" in browser.get("/").text, "a name as a badly encoded header has it"


def test_a_form_of_another_user_does_nothing_where_another_site_says_who_it_is(stage: Stage) -> None:
    queue = stage.sidejob.queue("mail")
    queue.pause()
    site = Site(stage.sidejob, Users({}), lambda request: (request.headers["authorization"], "operate"))
    with browser_of(site) as browser:
        for user, code in (("eve", 403), ("ann", 303)):
            shown = browser.get("/queues", headers={"authorization": user}).text
            form = {"name": "mail", "token": re.findall(r'name="token" value="(\w+)"', shown)[0]}
            assert browser.post("/queues/resume", data=form, headers={"authorization": "ann"}).status_code == code
            assert queue.paused == (code == 403)


def test_a_role_that_may_only_read_is_enough_to_read(stage: Stage) -> None:
    job = stage.job(tags=["vip"])
    with a_role(stage.database_url) as (role, url):
        stage.sql(f"GRANT USAGE ON SCHEMA {SCHEMA} TO {role}")
        stage.sql(f"GRANT SELECT ON ALL TABLES IN SCHEMA {SCHEMA} TO {role}")
        reading = make_app("stage", broker="memory://", sidejob_database_url=url).sidejob
        try:
            stage.runtime.connections.write_behind_now()
            before = stage.everything()
            with browser_of(Site(reading, Users(ENTRIES), None)) as browser:
                browser.log_in("ann")
                for entry in READING:
                    path = entry.path.format(id=job.id, direction="in", name="a", task_id="none")
                    found = browser.get(path)
                    missing = path.startswith(("/dead/", "/tasks/", "/find", "/batches/named"))
                    assert found.status_code == (404 if missing else 200), (path, found.text)
                refused = browser.submit(f"/jobs/{job.id}/terminate")
                assert refused.status_code >= 400
            assert stage.everything() == before
        finally:
            reading.close()


def test_without_users_there_is_no_page(stage: Stage) -> None:
    with pytest.raises(SettingsError, match="sidejob web user NAME"):
        asgi_app(stage.sidejob)


def test_an_unexpected_error_says_nothing_of_its_text(
    stage: Stage, site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*given: object) -> None:
        raise RuntimeError("the card number 4711")

    monkeypatch.setattr(type(stage.sidejob), "workers", fail)
    with browser_of(site) as browser:
        browser._transport.raise_server_exceptions = False  # type: ignore[attr-defined]
        browser.log_in("ron")
        found = browser.get("/workers")
        assert found.status_code == 500
        assert "4711" not in found.text
        assert found.headers["x-frame-options"] == "DENY"


def test_a_page_where_a_stream_would_keep_a_thread_asks_for_none(stage: Stage) -> None:
    job = stage.job()
    with browser_of(Site(stage.sidejob, Users(ENTRIES), None, is_live=False)) as browser:
        browser.log_in("ron")
        assert "data-live" not in browser.text(f"/jobs/{job.id}")
        assert browser.get(f"/live/jobs/{job.id}").status_code == 404
