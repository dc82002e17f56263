"""Aliases and children's names."""

from __future__ import annotations

from uuid import UUID

import pytest

from celery_sidejob.model.errors import InvalidAliasError, InvalidValueError
from celery_sidejob.model.names import check_alias, check_child_name

A_UUID = UUID("abcdefab-cdef-4bcd-afab-cdefabcdefab")


@pytest.mark.parametrize("name", ["a", "Shop", "order-12/é", "abc\n", "ünit", "a" * 255, "abcdef", "urn:uuid:x"])
def test_a_good_alias_is_returned(name):
    assert check_alias(name) == name


@pytest.mark.parametrize("name", ["", "1a", "_a", " a", "-a", "\na", "½", "{a}", None, 7, b"a"])
def test_an_alias_starts_with_a_letter(name):
    with pytest.raises(InvalidAliasError, match=r"must start with a letter|is a string"):
        check_alias(name)


@pytest.mark.parametrize(
    "name",
    [str(A_UUID), str(A_UUID).upper(), A_UUID.hex, A_UUID.urn, f"uuid:{A_UUID}", "a" + "-" * 40 + A_UUID.hex[1:]],
)
def test_an_alias_is_no_uuid_in_any_spelling(name):
    assert UUID(name) == A_UUID
    with pytest.raises(InvalidAliasError, match="UUID"):
        check_alias(name)


UNSTORABLE = [("a" * 256, "256 characters; 255 are allowed"), ("a\0", "NUL"), ("a\udc00", "surrogate")]


@pytest.mark.parametrize(("name", "problem"), UNSTORABLE)
def test_what_postgres_cannot_keep_is_refused(name, problem):
    with pytest.raises(InvalidAliasError, match=f"cannot be an alias: .*{problem}"):
        check_alias(name)
    with pytest.raises(InvalidValueError, match=f"cannot be a child's name: .*{problem}"):
        check_child_name(name)


@pytest.mark.parametrize("name", ["a", "1", " ", "é/\n", str(A_UUID), "x" * 255])
def test_any_other_text_is_a_good_name_for_a_child(name):
    assert check_child_name(name) == name


@pytest.mark.parametrize("name", ["", None, 7, b"a"])
def test_a_childs_name_is_a_text_and_not_empty(name):
    with pytest.raises(InvalidValueError, match="a child's name"):
        check_child_name(name)
