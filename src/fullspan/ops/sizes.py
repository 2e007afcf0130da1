"""Whole-number helpers. Imports no torch."""


def power_of_2(number: int) -> int:
    """The smallest power of two that is not below number, and at least 1."""
    return 1 << max(0, (number - 1).bit_length())


def ceil_div(number: int, by: int) -> int:
    """number / by, rounded up."""
    return -(-number // by)


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below number."""
    return ceil_div(number, multiple) * multiple
