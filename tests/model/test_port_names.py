"""Port names, the options ports are made with, and NO_DATA."""

from __future__ import annotations

import copy
import pickle

import pytest

from celery_sidejob.model.errors import InvalidChannelError, InvalidPortError, InvalidValueError
from celery_sidejob.model.port import NO_DATA, NoData, PortOptions, check_port_name, parse_ports


@pytest.mark.parametrize("name", ["a", "A1_b", "_", "0", "x" * 255])
def test_a_good_name_is_returned(name):
    assert check_port_name(name) == name


@pytest.mark.parametrize(
    "name", ["", "a.b", "a b", "a\n", "\na", "a\nb!", "é", "\u0661", "a-b", "**", "x" * 256, None, 1]
)
def test_a_bad_name_is_refused(name):
    for wildcard in (False, True):
        with pytest.raises(InvalidPortError, match=r"a port's name"):
            check_port_name(name, wildcard=wildcard)


def test_the_wildcard_is_a_name_only_where_it_is_allowed():
    assert check_port_name("*", wildcard=True) == "*"
    with pytest.raises(InvalidPortError, match="stands"):
        check_port_name("*")


def test_names_alone_give_ports_without_options_in_their_order():
    for spec in (["b", "a"], ("b", "a"), {"b": None, "a": {}}):
        ports = parse_ports(spec, where="inports of task t")
        assert list(ports.items()) == [("b", PortOptions()), ("a", PortOptions())]
    assert parse_ports(None, where="inports of task t") == {}
    assert parse_ports([], where="inports of task t") == {}


def test_options_are_read():
    ports = parse_ports(
        {
            "a": {"default": None, "channels": ["/x", "/y", "/x"]},
            "b": {"limit": None},
            "*": {"default": 0, "channels": ["/z"]},
        },
        where="w",
    )
    assert ports == {
        "a": PortOptions(default=None, channels=("/x", "/y")),
        "b": PortOptions(),
        "*": PortOptions(default=0, channels=("/z",)),
    }
    assert ports["a"].default is None
    assert ports["b"].default is NO_DATA


def test_a_default_is_a_copy_as_readers_get_it():
    given = {"list": (1, 2)}
    ports = parse_ports({"a": {"default": given}}, where="w")
    given["list"] = "changed"
    assert ports["a"].default == {"list": [1, 2]}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ab", "pass a list of names, .* not a str"),
        (b"ab", "not a bytes"),
        ({"a", "b"}, "not a set"),
        (7, "not a int"),
        (["a", "a"], "'a' is named twice"),
        (["a", "a.b"], "'a.b' is not a port's name"),
        ([None], "not a NoneType"),
        ({"a": {"defualt": 1}}, "port 'a': unknown option 'defualt'; the options are default, channels, limit"),
        ({"a": {"zzz": 1}}, "the options are default, channels, limit"),
        ({"a": {3: 1}}, "unknown option 3"),
        ({"a": ["/x"]}, "options are a mapping or None, not a list"),
        ({"a": {"channels": "/x"}}, r'channels are a list, such as \["/sums"\], not a str'),
        ({"a": {"channels": None}}, "channels are a list"),
        ({"a": {"limit": 0}}, "limit is a number of packets from 1 to 2147483647, not 0"),
        ({"a": {"limit": True}}, "limit is a number of packets .*, not True"),
    ],
)
def test_a_wrong_specification_is_refused_with_its_place(spec, message):
    with pytest.raises(InvalidPortError, match=f"^inports of task t: .*{message}"):
        parse_ports(spec, where="inports of task t")


def test_a_wrong_channel_is_refused_with_its_place():
    with pytest.raises(InvalidChannelError, match=r"^outports: port 'a': 'x' is not a channel's name: it must begin"):
        parse_ports({"a": {"channels": ["x"]}}, where="outports")


def test_a_default_that_is_no_value_is_refused_with_its_path():
    with pytest.raises(InvalidValueError, match=r"^outports: port 'a': default\[0\]: .* set"):
        parse_ports({"a": {"default": [set()]}}, where="outports")


def test_no_data_is_falsy_says_its_name_and_stays_the_only_one():
    assert not NO_DATA
    assert repr(NO_DATA) == "NO_DATA"
    assert isinstance(NO_DATA, NoData)
    assert copy.copy(NO_DATA) is NO_DATA
    assert copy.deepcopy([NO_DATA])[0] is NO_DATA
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(NO_DATA, protocol)) is NO_DATA
    assert pickle.loads(pickle.dumps(PortOptions())) == PortOptions()
