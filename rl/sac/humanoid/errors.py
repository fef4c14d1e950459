"""UserError for bad input: fire_core's, or one defined here if the H1 tasks are installed alone."""

try:
    from fire_core.errors import UserError
except ModuleNotFoundError:

    class UserError(ValueError):  # type: ignore[no-redef]
        """An error that the user can correct. Its message quotes the value and says what to do."""


__all__ = ["UserError"]
