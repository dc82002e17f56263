"""A bracket that nobody closed."""

PRIMES = [2, 3, 5, 7, 11


def is_prime(number):
    return number in PRIMES
