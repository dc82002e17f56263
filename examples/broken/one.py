"""Python 2: a census must say so, not fail."""


def greet(name):
    print "Hello, %s" % name
