"""Bad input: in the suite the error that its scripts print as one line; the H1 tasks alone bring their own."""

try:
    from fire_core.errors import UserError
except ModuleNotFoundError:

    class UserError(ValueError):  # type: ignore[no-redef]
        """An error that the user can correct. Its message quotes the value and says what to do."""


__all__ = ["UserError"]
