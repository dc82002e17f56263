"""The pages in a real browser: with and without scripts, dark and light, on a narrow screen, by the keyboard."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from celery_sidejob import CapacityPool, RunningJob
from celery_sidejob.jobs import batch as batches
from tests.tools.browsers import PASSWORDS
from tests.tools.chromium import NEEDED, chromium
from tests.tools.in_process import Stage
from tests.tools.waiting import wait_until

pytestmark = NEEDED
PAGES = ("/", "/jobs", "/jobs?tag=vip", "/jobs/{job}", "/jobs/{job}/tree", "/jobs/{job}/graph",
         "/jobs/{job}/ports/in/orders", "/jobs/bulk?verb=terminate&queue=celery", "/batches",
         "/batches/named?name=import", "/tasks", "/tasks/{task}", "/dead", "/dead/{entry}", "/queues", "/workers",
         "/schedules", "/doctor", "/nothing")  # fmt: skip


def log_in(browser: Any, address: str, name: str = "ann") -> None:
    """Log in by the form, with the keyboard alone."""
    from selenium.webdriver.common.keys import Keys

    browser.get(f"{address}/")
    browser.switch_to.active_element.send_keys(name, Keys.TAB, PASSWORDS[name], Keys.ENTER)
    wait_until(lambda: browser.title.startswith("Overview"), message="the overview")


def shown(browser: Any, selector: str) -> str:
    """The text that a reader sees there; none while the page, or this part of a live one, is replaced by the next."""
    from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException

    try:
        return str(browser.find_element("css selector", selector).text)
    except (NoSuchElementException, StaleElementReferenceException):
        return ""


def severe(browser: Any) -> list[str]:
    """What the browser complains of: errors of scripts, and what the policy forbids."""
    return [entry["message"] for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]


def steps(job: RunningJob) -> None:
    job.step("charge", lambda: 42)
    job.step("<b>send</b>", lambda: "<script>document.title = 'taken over'</script>")
    job.suspend()  # its records live until it completes


@pytest.fixture
def job_id(stage: Stage) -> int:
    """A job with steps, whose texts look like markup."""
    job = stage.job(steps, tags=["<i>vip</i>"])
    stage.run(job)
    return job.id


def fail(job: RunningJob) -> None:
    raise ValueError("no such order")


def send_mail(to: str) -> None:
    pass


@pytest.fixture
def names(stage: Stage, job_id: int) -> dict[str, Any]:
    """Rows of each kind, and what stands for them in the paths of pages."""
    stage.sidejob.get(job_id).input("orders").write({"number": 7})
    send = stage.app.task(durable=True, name="stage.send", shared=False)(send_mail)
    with stage.sidejob.batch("import", on_complete=send.s("ann")):
        stage.job(fail, parent=job_id, child_name="first")
        stage.job(depends_on=[job_id])
        task_id = send.apply_async(("ann@example.org",), countdown=3600).id
    for job in stage.sidejob.get(job_id).children.values():
        with pytest.raises(ValueError, match="no such order"):
            stage.run(job)
    batches.settle_all(stage.runtime)
    stage.sidejob.queue("mail").pause("the printer is on fire")
    stage.sidejob.schedule("nightly", stage.idle, every=timedelta(hours=6))
    CapacityPool("printers", 4).apply_async(stage.idle)
    stage.claim(stage.job(queue="reports"))
    return {"job": job_id, "task": task_id, "entry": stage.sidejob.dead.list()[0].id}


@pytest.mark.few(1)
@pytest.mark.parametrize(("dark", "width"), [(False, 1280), (True, 360)])
def test_every_page(address: str, names: dict[str, Any], tmp_path: Path, dark: bool, width: int) -> None:
    from selenium_axe_python import Axe

    with chromium(tmp_path, width=width, dark=dark) as browser:
        log_in(browser, address)
        axe = Axe(browser)
        grounds = set()
        for page in PAGES:
            browser.get(address + page.format(**names))
            assert page == "/nothing" or severe(browser) == []
            assert browser.execute_script("return innerWidth") == width
            wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
            assert browser.execute_script(wide) == 0, f"{page} is wider than the screen"
            browser.execute_script("for (const each of document.querySelectorAll('details')) each.open = true")
            axe.inject()
            found = axe.run()["violations"]
            assert found == [], f"{page}: {axe.report(found)}"
            grounds.add(browser.execute_script("return getComputedStyle(document.documentElement).backgroundColor"))
        assert grounds == {"rgb(18, 22, 21)" if dark else "rgb(251, 251, 250)"}


def test_a_job(address: str, job_id: int, tmp_path: Path) -> None:
    with chromium(tmp_path) as browser:
        log_in(browser, address)
        browser.get(f"{address}/jobs/{job_id}")
        assert browser.title == f"Job {job_id} · stage", "its texts are no markup"
        assert "<b>send</b>" in browser.find_element("css selector", ".waterfall").get_attribute("textContent")
        assert "UTC" in browser.find_element("css selector", "time").get_attribute("title")
        browser.find_element("link text", "<i>vip</i>").click()
        wait_until(lambda: "/jobs?" in browser.current_url, message="the list of jobs")
        wait_until(lambda: shown(browser, "tbody a") == str(job_id), message="the job in the list")


def test_a_job_is_followed(stage: Stage, address: str, tmp_path: Path) -> None:
    job = stage.job(tags=["before"])
    with chromium(tmp_path) as browser:
        log_in(browser, address)
        browser.get(f"{address}/jobs/{job.id}")
        wait_until(lambda: shown(browser, ".sign") == "Live", message="the page to be live")
        wait_until(lambda: "queued" in shown(browser, "main h1"), message="the page to show the job")
        stage.run(job)
        wait_until(lambda: "completed" in shown(browser, "main"), message="the page to show the end of the job")
        assert severe(browser) == []


def test_without_scripts(address: str, job_id: int, tmp_path: Path) -> None:
    with chromium(tmp_path, scripts=False) as browser:
        log_in(browser, address)
        browser.get(f"{address}/jobs")
        browser.find_element("name", "tag").send_keys("none such")
        browser.find_element("css selector", ".filters button").click()
        wait_until(lambda: "No job matches." in shown(browser, "main"), message="the filtered list")
        browser.find_element("name", "which").send_keys(str(job_id))
        browser.find_element("name", "which").submit()  # which does not wait for the page that comes
        wait_until(lambda: browser.current_url == f"{address}/jobs/{job_id}", message="the job's page")
        wait_until(lambda: shown(browser, "h1").split()[:2] == ["Job", str(job_id)], message="its heading")
        browser.find_element("css selector", "header button").click()
        wait_until(lambda: browser.current_url == f"{address}/login", message="the page of the login")


def test_an_id_is_copied_by_a_click_and_by_the_keyboard(address: str, stage: Stage, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    job = stage.job()
    with chromium(tmp_path) as browser:
        log_in(browser, address)
        browser.execute_cdp_cmd(
            "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
        )
        browser.get(f"{address}/jobs/{job.id}")
        copy = browser.find_element("css selector", "code.copy + button")
        read = "const done = arguments[0]; navigator.clipboard.readText().then(done)"
        copy.click()
        wait_until(lambda: copy.text == "Copied", message="the id to be copied")
        assert browser.execute_async_script(read) == job.task_id
        browser.execute_async_script("const done = arguments[0]; navigator.clipboard.writeText('-').then(done)")
        copy.send_keys(Keys.ENTER)
        wait_until(lambda: browser.execute_async_script(read) == job.task_id, message="the id to be copied again")


def test_the_graph_is_walked_by_the_keyboard(address: str, stage: Stage, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    top = stage.job()
    child = top.enqueue(stage.idle, child_name="child")
    with chromium(tmp_path) as browser:
        log_in(browser, address)
        browser.get(f"{address}/jobs/{top.id}/graph")
        node = browser.find_element("css selector", f'.graph a[href="/jobs/{child.id}"]')
        browser.find_element("css selector", ".graph a").send_keys(Keys.TAB)
        assert browser.switch_to.active_element == node
        node.send_keys(Keys.ENTER)
        wait_until(lambda: browser.title.startswith(f"Job {child.id} "), message="the page of the child")


def test_a_lost_connection_is_shown_and_made_up_for(address: str, stage: Stage, tmp_path: Path) -> None:
    with chromium(tmp_path) as browser:
        network = {"latency": 0, "downloadThroughput": -1, "uploadThroughput": -1}
        browser.execute_cdp_cmd("Network.enable", {})
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", {**network, "offline": False})
        log_in(browser, address)
        browser.get(f"{address}/batches")
        wait_until(lambda: shown(browser, ".sign") == "Live", message="the page to be live")
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", {**network, "offline": True})
        stage.sidejob.batch("import 7")
        wait_until(
            lambda: shown(browser, ".sign").startswith("Not live"), message="the page to say that it is not live"
        )
        assert "There is no batch." in shown(browser, "main")
        browser.execute_cdp_cmd("Network.emulateNetworkConditions", {**network, "offline": False})
        wait_until(lambda: "import 7" in shown(browser, "main"), message="what has been missed")
        wait_until(lambda: shown(browser, ".sign") == "Live", message="the page to be live again")


def test_what_a_reader_has_opened_and_focused_stays_so(address: str, stage: Stage, tmp_path: Path) -> None:
    top = stage.job()
    top.enqueue(stage.idle, child_name="child")
    with chromium(tmp_path) as browser:
        log_in(browser, address)
        browser.get(f"{address}/jobs/{top.id}/graph")
        wait_until(lambda: shown(browser, ".sign") == "Live", message="the page to be live")
        browser.find_element("css selector", "main summary").click()
        browser.execute_script("document.querySelector('.graph a').focus()")
        stage.run(top)
        wait_until(lambda: "completed" in shown(browser, ".graph"), message="the end of the job")
        assert browser.find_element("css selector", "main details").get_attribute("open") is not None
        assert browser.switch_to.active_element.get_attribute("aria-label") == f"Job {top.id}: stage.idle, completed"
