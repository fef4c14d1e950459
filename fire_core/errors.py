"""The one error type for mistakes that the caller can mend."""


class UserError(ValueError):
    """Bad input: the message quotes the value and says what to do. Scripts print it as one line, exit code 2."""
