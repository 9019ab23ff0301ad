"""The one exception for what a user can put right."""


class InputError(ValueError):
    """Something that was given cannot be used; the message says what was got, what is allowed and
    what to do.

    The command line prints the message and exits with code 2. A library user gets a ValueError.
    """


class TrainingStopped(RuntimeError):
    """Training could not go on (a loss that is not finite, say); what is on disk is as it was."""


class DeviceFailed(TrainingStopped):
    """The GPU failed, so nothing more can be computed in this process; what is on disk is as it
    was."""


class EngineWarning(UserWarning):
    """A model runs by a slower implementation than usual, because the usual one would not be exact
    for it."""


def one_of(name: str, got: object, allowed: object) -> InputError:
    """The error for a value outside a fixed list: `one_of("mode", "enpt", ["decoder", "entp"])`."""
    import difflib

    names = [str(a) for a in allowed]  # type: ignore[attr-defined]
    close = difflib.get_close_matches(str(got), names, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    shown = [repr(one) if "," in one else one for one in names]
    return InputError(f"unknown {name} {got!r}: allowed are {', '.join(shown)}.{hint}")
