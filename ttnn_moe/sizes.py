"""Arithmetic of sizes."""


def power_of_2(n: int) -> int:
    """The least power of two that is not below n; 1 for n below 1."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(n: int, size: int) -> int:
    """How many pieces of `size` hold n: n / size, rounded up."""
    return -(-n // size)


def natural(text: str) -> int | None:
    """The number that ASCII digits write, of at most 18 digits; None for any other text."""
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 18 else None
