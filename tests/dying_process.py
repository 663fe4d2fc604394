"""A process that dies at any of some calls, before it or after it."""


class DiedError(BaseException):
    """The process died."""


def dying_at(number, monkeypatch, *points):
    """Have the process die at the ``number``-th moment: each call of a point has one before it and one after it.

    A point is an owner and the name of its function; and, where not all calls count, what says of a call's arguments whether it
    does.
    """
    passed = 0

    def wrap(owner, name, counts=lambda *_args, **_names: True):
        real = getattr(owner, name)

        def dying(*args, **names):
            nonlocal passed
            if not counts(*args, **names):
                return real(*args, **names)
            passed += 1
            if passed == number:
                raise DiedError
            result = real(*args, **names)
            passed += 1
            if passed == number:
                if name == "open":
                    result.close()
                raise DiedError
            return result

        monkeypatch.setattr(owner, name, dying)

    for point in points:
        wrap(*point)
