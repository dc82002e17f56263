"""A site over the stage's app, and browsers that have logged in."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from celery import _state

from celery_sidejob.web.site import Site
from celery_sidejob.web.users import Users, make_token
from tests.tools.browsers import ENTRIES, Browser, Program, browser_of, serving
from tests.tools.in_process import Stage


@pytest.fixture(autouse=True)
def no_shared_tasks() -> Iterator[None]:
    """A task that a test makes without `shared=False` would be in each later app, whose own of that name then fails."""
    before = len(_state._on_app_finalizers)
    yield
    assert len(_state._on_app_finalizers) == before, "a test has made a task without shared=False"


@pytest.fixture
def site(stage: Stage) -> Site:
    """The site of the stage's app: ann operates, ron reads."""
    return Site(stage.sidejob, Users(ENTRIES), None)


@pytest.fixture
def stranger(site: Site) -> Iterator[Browser]:
    """A browser that has not logged in."""
    with browser_of(site) as browser:
        yield browser


@pytest.fixture
def reader(site: Site) -> Iterator[Browser]:
    """Ron's browser: he may read."""
    with browser_of(site) as browser:
        assert browser.log_in("ron").status_code == 303
        yield browser


@pytest.fixture
def operator(site: Site) -> Iterator[Browser]:
    """Ann's browser: she may operate."""
    with browser_of(site) as browser:
        assert browser.log_in("ann").status_code == 303
        yield browser


@pytest.fixture
def browser(site: Site) -> Iterator[Browser]:
    """Sends what programs send; nobody has logged in."""
    with browser_of(site) as made:
        yield made


@pytest.fixture
def with_token(stage: Stage, browser: Browser) -> Callable[..., Program]:
    """Makes a program with a token of these scopes."""

    def made(*scopes: str) -> Program:
        return Program(browser, make_token(stage.runtime, "-".join(scopes), scopes))

    return made


@pytest.fixture
def program(with_token: Callable[..., Program]) -> Program:
    """A program that may do everything."""
    return with_token("read", "write", "operate")


@pytest.fixture
def address(site: Site) -> Iterator[str]:
    """The site on a port of this machine."""
    with serving(site) as at:
        yield at
