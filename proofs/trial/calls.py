"""The loop of a client of a trial, and what a call of it may raise."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable

import psycopg
from kombu.exceptions import OperationalError as BrokerAway
from redis.exceptions import RedisError

from celery_sidejob import StoreUnavailableError

AWAY = (StoreUnavailableError, psycopg.OperationalError, psycopg.InterfaceError, BrokerAway, RedisError, OSError)
"""What a call may raise when a server is away. Anything else is a finding."""
AWAY_S = 0.5


def call_until_stopped(call: Callable[[], bool], *, rate: float, dice: random.Random) -> None:
    """Call at this rate until SIGTERM; `call` tells whether the servers were there, else there is a longer pause."""
    stopping = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
    while not stopping.is_set():
        served = call()
        stopping.wait(dice.expovariate(rate) if served else AWAY_S)
