"""Methods of Celery, kombu and py-amqp that are replaced: a file for each subject, a test for each method.

Here is how a method of one object is replaced, and its class.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def wrap(owner: Any, name: str, by: Callable[..., Any]) -> None:
    """Redirect calls of a method of this object to `by`, which gets the replaced method before the arguments."""
    setattr(owner, name, partial(by, getattr(owner, name)))


def become(thing: Any, *bases: type, **attributes: Any) -> None:
    """Give an object a class of these bases, with the name of its present class.

    Replaces the class of objects that Celery has made already, of tasks, `app.amqp` and `app.control`.

    Read in Celery 5.5.0 and 5.7.0. A base class is an official extension point for later objects (`app.Task`,
    `amqp_cls`, `control_cls`). Objects that a project made before `SideJob(app)`, or decorated with `@app.task` and
    named in a setting, get such a class afterwards. That works as long as these are plain Python objects, without
    `__slots__`, and Celery looks methods up on them. If a later Celery does not, Python raises TypeError here.
    """
    thing.__class__ = made_of(type(thing), *bases, **attributes)


def above(marker: type, base: type) -> Any:
    """Return a project's own class with `marker` above it; the marker itself if `base` is Celery's own."""
    if issubclass(base, marker):
        return base
    return marker if issubclass(marker, base) else made_of(base, marker, base)


def made_of(cls: type, *bases: type, **attributes: Any) -> type:
    """Return a class of these bases with the name of `cls`."""
    return type(cls.__name__, bases, {"__module__": cls.__module__, **attributes})
