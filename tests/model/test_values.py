"""Values come back equal, or are refused at the call with the path to what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import OrderedDict, defaultdict, namedtuple
from datetime import UTC, date, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from types import SimpleNamespace
from uuid import UUID, uuid4
from zoneinfo import ZoneInfo

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kombu.utils import json as kombu_json

from celery_sidejob.model.errors import InvalidValueError
from celery_sidejob.model.values import MAX_DEPTH, MAX_DIGITS, decode, encode

# Characters but surrogates; the words of the envelope often enough for dicts that look like one.
texts = st.text() | st.sampled_from(["", "\0", "__type__", "__value__", "dict", "uuid", "datetime", '"__type__"', "😀"])
# Whole seconds: Python reads an offset of a part of a second, which no zone has, as UTC.
zones = st.just(UTC) | st.builds(lambda seconds: timezone(timedelta(seconds=seconds)), st.integers(-82_800, 82_800))
atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=-(10**4299), max_value=10**4299)
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
    | st.datetimes(timezones=st.none() | zones)
    | st.dates()
    | st.times()
    | st.decimals(allow_nan=False, allow_infinity=False)
    | st.uuids()
)
values = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(texts, inner)
        | st.fixed_dictionaries({"__type__": texts | inner, "__value__": inner})
        | st.fixed_dictionaries({"__value__": inner, "__type__": texts | inner})
    ),
    max_leaves=20,
)


def shape(value):
    """Types and order as well as contents, since 1 == True == 1.0 and dicts compare without their order."""
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        return ["list", *(shape(item) for item in value)]
    return type(value), value, repr(value) if isinstance(value, (float, Decimal)) else None


# On a busy machine an example may take as long as it likes.
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@unhurried
@given(values)
def test_every_value_comes_back_with_its_types_and_order(value):
    text = encode(value)
    assert text.isascii()
    assert shape(decode(text)) == shape(value)


@unhurried
@given(values)
def test_encoding_leaves_the_value_as_it_was(value):
    before = shape(value)
    encode(value)
    assert shape(value) == before


@unhurried
@given(values)
def test_a_text_can_be_a_value_itself(value):
    text = encode(value)
    assert decode(encode([text, {"__type__": "dict", "__value__": text}]))[0] == text


@pytest.mark.parametrize(
    "value",
    [
        None,
        False,
        True,
        0,
        "",
        [],
        {},
        -0.0,
        1e308,
        5e-324,
        10**400,
        -(10 ** (MAX_DIGITS - 1)),
        "\0",
        "a\0b",
        {"\0": "\0"},
        "é€😀",
        {"é": 1},
        {"b": 1, "a": 2, "": 3},
        datetime(2024, 2, 29, 23, 59, 59, 999999),
        datetime(2024, 2, 29, 12, tzinfo=UTC),
        datetime(2024, 7, 1, 12, tzinfo=ZoneInfo("Europe/Berlin")),
        datetime(1900, 1, 1, tzinfo=timezone(timedelta(hours=-5, minutes=-30, seconds=-7))),
        date(1, 1, 1),
        time(23, 59, 59, 1),
        time(12, tzinfo=UTC),
        Decimal("1.10"),
        Decimal("-0"),
        Decimal("1E+400"),
        UUID(int=0),
    ],
)
def test_it_comes_back_equal_alone_and_inside(value):
    assert shape(decode(encode(value))) == shape(value)
    assert shape(decode(encode({"in": [value]}))) == shape({"in": [value]})


def test_an_aware_datetime_keeps_its_instant_even_where_clocks_go_back():
    ambiguous = datetime(2024, 10, 27, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin"))
    assert decode(encode(ambiguous)).astimezone(UTC) == datetime(2024, 10, 27, 1, 30, tzinfo=UTC)


@pytest.mark.parametrize(
    "value",
    [
        {"__type__": "datetime", "__value__": "2024-01-01T00:00:00"},
        {"__type__": "bytes", "__value__": "x"},
        {"__type__": "no such type", "__value__": None},
        {"__type__": "dict", "__value__": {"__type__": "dict", "__value__": {"a": 1}}},
        {"__type__": {"__type__": "uuid", "__value__": {"hex": "0" * 32}}, "__value__": []},
        {"__value__": 1, "__type__": "dict"},
        {"__type__": "datetime"},
        {"__value__": 1},
        {"__type__": "date", "__value__": "2024-01-01", "more": 1},
        {"__type__": None, "__value__": [datetime(2024, 1, 1, tzinfo=UTC), {"__type__": 1, "__value__": uuid4()}]},
    ],
)
def test_a_dict_that_looks_like_an_envelope_comes_back_as_that_dict(value):
    assert shape(decode(encode(value))) == shape(value)
    encoded_twice = encode(json.loads(encode(value)))
    assert shape(json.loads(encode(value))) == shape(decode(encoded_twice))


@pytest.mark.parametrize(
    "value", [datetime(2024, 1, 1, 1, tzinfo=UTC), date(2024, 1, 1), time(1, 2), Decimal("1.5"), UUID(int=7)]
)
def test_envelopes_are_those_of_kombu(value):
    assert json.loads(encode(value)) == json.loads(kombu_json.dumps(value))
    assert kombu_json.loads(encode(value)) == value


class Colour(StrEnum):
    RED = "red"


class Level(IntEnum):
    HIGH = 3


class Shade(str, Enum):  # noqa: UP042 - the older spelling, whose str() is "Shade.DARK", is what this tests
    DARK = "dark"


class SafeText(str):
    pass


class OddText(str):
    """Equal to itself only."""

    __hash__ = object.__hash__

    def __eq__(self, other):
        return self is other


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "back"),
    [
        ((1, (2, ())), [1, [2, []]]),
        (Point(1, 2), [1, 2]),
        (Colour.RED, "red"),
        (Shade.DARK, "dark"),
        (Level.HIGH, 3),
        ({Colour.RED: {Shade.DARK: (Level.HIGH,)}}, {"red": {"dark": [3]}}),
        (SafeText("é"), "é"),
        ({OddText("__type__"): "date", OddText("__value__"): 1}, {"__type__": "date", "__value__": 1}),
        (OrderedDict(b=1, a=(2,)), {"b": 1, "a": [2]}),
        (defaultdict(list, a=[1]), {"a": [1]}),
        (OrderedDict(__type__="date", __value__=()), {"__type__": "date", "__value__": []}),
    ],
)
def test_what_json_has_no_type_for_comes_back_as_its_plain_equal(value, back):
    assert shape(decode(encode(value))) == shape(back)


class Handle:
    def __init__(self, plain):
        self.plain = plain

    def __json__(self):
        return self.plain


def test_an_object_is_encoded_as_what_its_json_method_returns():
    assert decode(encode({"job": Handle(7), "more": [Handle((Handle(None),))]})) == {"job": 7, "more": [[None]]}
    with pytest.raises(InvalidValueError, match=r'^value\["a"\]\["b"\]: .*set'):
        encode({"a": Handle({"b": {1}})})
    with pytest.raises(InvalidValueError, match="type"):
        encode(Handle)  # the class is not an object of it


def itself():
    handle = Handle(None)
    handle.plain = handle
    return handle


class Plain(Enum):
    ONE = 1


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (float("nan"), "nan is not a JSON value"),
        (float("inf"), "inf is not a JSON value"),
        (float("-inf"), "-inf is not a JSON value"),
        (Decimal("NaN"), "the Decimal NaN is not"),
        (Decimal("-Infinity"), "the Decimal -Infinity is not"),
        (Decimal("sNaN"), "the Decimal sNaN is not"),
        (b"x", "bytes is not a JSON value: pass text instead"),
        (bytearray(b"x"), "bytearray"),
        (memoryview(b"x"), "memoryview"),
        ({1}, "set is not a JSON value: pass a list instead"),
        (frozenset(), "frozenset"),
        (object(), "object"),
        (1j, "complex"),
        (timedelta(1), "timedelta"),
        (range(3), "range"),
        (iter([]), "iterator"),
        (Plain.ONE, "Plain is not a JSON value: pass its value instead"),
        (int, "type"),
        ("\ud800", r"lone surrogate '\ud800' at index 0"),
        ("ab\udfffc", r"lone surrogate '\udfff' at index 2"),
        ("\ud83d\ude00", "lone surrogate"),  # JSON would join the two into one character
        (SafeText("\ud800"), "lone surrogate"),
        ({"\ud800": 1}, "a key holds a lone surrogate"),
        ({3: 1}, "keys must be strings, not 3 (int)"),
        ({None: 1}, "keys must be strings, not None (NoneType)"),
        ({True: 1}, "keys must be strings, not True (bool)"),
        ({(1, 2): 1}, "keys must be strings, not a tuple"),
        ({b"a": 1}, "keys must be strings, not a bytes"),
        pytest.param(10**MAX_DIGITS, "too large: pass it as a string", id="4301 digits"),
        pytest.param(-(10**100_000), "too large: pass it as a string", id="100001 digits"),
        ({OddText("a"): 1, "a": 2}, "two keys become the same string"),
        (itself(), "or contains itself"),
    ],
)
def test_it_is_refused_with_the_path_to_it(bad, reason):
    for value, path in [
        (bad, "value: "),
        ({"ok": [1], "a": [0, {}, "x", bad]}, 'value["a"][3]: '),
        ([(0, {"é\0": bad})], 'value[0][1]["\\u00e9\\u0000"]: '),
        ({"__type__": "dict", "__value__": {"b": bad}}, 'value["__value__"]["b"]: '),
    ]:
        with pytest.raises(InvalidValueError) as refused:
            encode(value)
        assert str(refused.value).startswith(path)
        assert reason in str(refused.value)


def test_the_message_names_the_value_as_the_caller_does():
    with pytest.raises(InvalidValueError, match=r"^args\[1\]: "):
        encode([0, {0}], what="args")


def test_what_contains_itself_is_refused():
    endless = {"list": []}
    endless["list"].append(endless)
    with pytest.raises(
        InvalidValueError, match=r'^value\["list"\]\[0\]\["list"\]\[0\].*…: nested .* or contains itself'
    ):
        encode(endless)


def nested(levels, wrap):
    value = wrap(None)
    for _ in range(levels - 1):
        value = wrap(value)
    return value


@pytest.mark.parametrize(
    ("wrap", "levels_each"),
    [
        (lambda inner: [inner], 1),
        (lambda inner: {"a": inner}, 1),
        (lambda inner: (inner,), 1),
        (lambda inner: {"__type__": inner, "__value__": 0}, 2),
    ],
)
def test_the_deepest_value_comes_back_and_a_deeper_one_is_refused(wrap, levels_each):
    deepest = MAX_DEPTH // levels_each
    text = encode(nested(deepest, wrap))
    assert encode(decode(text)) == text
    with pytest.raises(InvalidValueError, match=f"nested more than {MAX_DEPTH} levels deep"):
        encode(nested(deepest + 1, wrap))
    with pytest.raises(InvalidValueError, match="nested"):
        encode(nested(100_000, wrap))


def test_a_value_used_twice_is_no_cycle():
    shared = {"a": [1]}
    assert decode(encode([shared, shared])) == [shared, shared]


def test_the_limit_counts_the_bytes_of_the_text():
    assert encode("é" * 10, limit=62) == '"' + "\\u00e9" * 10 + '"'
    with pytest.raises(InvalidValueError, match=r"^state: 62 bytes .* limit of 61 .*sidejob_max_value_bytes"):
        encode("é" * 10, limit=61, what="state")


def test_the_text_is_compact():
    assert encode({"a": [1, None]}) == '{"a":[1,null]}'


def test_foreign_envelopes_are_not_guessed_at():
    for text in ['{"__type__":"base64","__value__":"eA=="}', '{"__type__":[],"__value__":1}']:
        with pytest.raises(InvalidValueError, match="unknown type"):
            decode(text)


class Text(str):
    """A string that is not quite one, as Django's SafeString."""


SHARED = ["x"]
for _ in range(40):
    SHARED = [SHARED] * 10


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("value", "path"),
    [
        ("x" * 10_001, ""),
        (Text("x" * 10_001), ""),
        ("é" * 10_001, ""),
        ([["x" * 100] * 101], r"\[0\]\[97\]"),
        ([0] * 10_001, ""),
        ({f"{number:05}": 0 for number in range(2000)}, ""),
        (("a", {"b": "x" * 10_001}), r"\[1\]\[\"b\"\]"),
        (SHARED, r"(\[\d+\])+…?"),
    ],
    ids=["text", "its own class", "not ASCII", "texts", "numbers", "keys", "deep", "shared"],
)
def test_what_is_much_too_large_is_refused_before_it_is_encoded(monkeypatch, value, path):
    monkeypatch.setattr("celery_sidejob.model.values._ENCODER", SimpleNamespace(encode=pytest.fail))
    with pytest.raises(
        InvalidValueError, match=rf"^args{path}: more than 10000 bytes of JSON exceed the limit of 10000 "
    ):
        encode(value, limit=10_000, what="args")


@unhurried
@given(values)
def test_what_fits_exactly_is_never_refused(value):
    text = encode(value)
    assert encode(value, limit=len(text)) == text


def test_an_integer_above_the_limit_of_this_process_is_refused():
    # Python lets a process allow fewer or more digits. With more, others still could not read it.
    program = (
        "from celery_sidejob.model.values import encode\n"
        "from celery_sidejob.model.errors import InvalidValueError\n"
        "encode(10**639)\n"
        "try: encode([10**{digits}])\n"
        "except InvalidValueError as error: print(error)"
    )
    for allowed, digits in [("640", 641), ("0", 4300)]:
        ran = subprocess.run(
            [sys.executable, "-X", f"int_max_str_digits={allowed}", "-c", program.format(digits=digits)],
            capture_output=True,
            text=True,
            check=True,
        )
        assert ran.stdout.startswith("value[0]: an integer of")
