"""A merge that nobody finished."""


def answer():
<<<<<<< ours
    return 42
=======
    return 41 + 1
>>>>>>> theirs
