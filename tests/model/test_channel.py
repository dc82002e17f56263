"""Channel names and their ancestors."""

from __future__ import annotations

import pytest

from celery_sidejob.model.errors import InvalidChannelError
from celery_sidejob.model.names import channel_ancestors, channel_of_job, check_channel


@pytest.mark.parametrize(
    "name", ["/", "/a", "/a/b/c", "/sidejob/log", "/with space", "/é/*", "/a.b-c_d", "/" + "x" * 511]
)
def test_a_good_name_is_returned(name):
    assert check_channel(name) == name


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", 'begin with "/"'),
        ("sums", 'begin with "/"'),
        ("a/b", 'begin with "/"'),
        (" /a", 'begin with "/"'),
        ("/a/", 'not end with "/"'),
        ("//", 'not end with "/"'),
        ("//a", "empty part"),
        ("/a//b", "empty part"),
        ("/a\0", "NUL"),
        ("/\ud800", "surrogate"),
        ("/" + "x" * 512, "513 characters; 512 are allowed"),
        (None, "not a NoneType"),
        (b"/a", "not a bytes"),
    ],
)
def test_a_bad_name_is_refused_with_what_is_wrong(name, problem):
    with pytest.raises(InvalidChannelError, match=problem) as refused:
        check_channel(name)
    assert str(refused.value).isprintable()


@pytest.mark.parametrize(
    ("name", "expected"),
    [("/", ["/"]), ("/a", ["/a", "/"]), ("/a/b/c", ["/a/b/c", "/a/b", "/a", "/"])],
)
def test_ancestors_are_the_channel_itself_then_up_to_the_root(name, expected):
    assert channel_ancestors(name) == expected


def test_a_jobs_own_channel_is_that_of_the_contract():
    assert channel_of_job(12) == "/sidejob/job/12"
    assert channel_ancestors(check_channel(channel_of_job(12)))[-2:] == ["/sidejob", "/"]
