from __future__ import annotations

import pytest
from psycopg.conninfo import conninfo_to_dict

from celery_sidejob.model.urls import address, is_clear

CLEAR = {
    "postgresql://": {},
    "postgresql://host/shop": {"host": "host", "dbname": "shop"},
    "postgresql://me:pass@host:5433/shop": {
        "user": "me", "password": "pass", "host": "host", "port": "5433", "dbname": "shop",
    },
    "postgresql://me@one:1,two/shop": {"user": "me", "host": "one,two", "port": "1,", "dbname": "shop"},
    "postgresql://me:p%2F%23%40s@[::1]:5433/a%23b": {
        "user": "me", "password": "p/#@s", "host": "::1", "port": "5433", "dbname": "a#b",
    },
    "postgresql://me:a#b?c[d@host/shop": {"user": "me", "password": "a#b?c[d", "host": "host", "dbname": "shop"},
    "postgresql:///shop?host=/run/postgresql&password=a#b": {
        "dbname": "shop", "host": "/run/postgresql", "password": "a#b",
    },
}  # fmt: skip
UNCLEAR = [
    "me:SE/CRET@host/shop", "me:54/SECRET@host/shop", "me:54/SE#CRET@host/shop", "me:SE@CRET@host/shop",
    "me:SE%CRET@host/shop", "me:SECRET%00@host/shop", "me:SECRET", "host:5432#SECRET/shop", "host/shop#SECRET",
    "host/shop#SECRET?sslmode=require", "host/shop?sslmode=require#SECRET", "me:54/a?SECRET@host/shop", "[SECRET/shop",
    "me:SE CRET@host/shop", "host/shop?sslpassword=SE CRET",
]  # fmt: skip


@pytest.mark.parametrize("url", CLEAR)
def test_a_clear_url_is_read_as_it_is_meant(url: str) -> None:
    assert is_clear(url)
    assert is_clear(url.replace("postgresql:", "postgresql+psycopg:"))
    assert conninfo_to_dict(url) == CLEAR[url]


@pytest.mark.parametrize("rest", UNCLEAR)
def test_a_url_that_libpq_would_misread_is_not_clear(rest: str) -> None:
    assert not is_clear(f"postgresql://{rest}")


@pytest.mark.parametrize(
    ("url", "where"),
    [
        ("postgresql://me:a#b@Host/shop", ("host:5432", "shop")),
        ("postgresql://one,two:1/shop?port=7", ("one:7,two:1", "shop")),
        ("postgresql:///?host=/run&dbname=shop", ("/run:5432", "shop")),
    ],
)
def test_where_a_url_leads(url: str, where: tuple[str, str]) -> None:
    assert address(url) == where
