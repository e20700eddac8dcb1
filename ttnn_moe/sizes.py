"""Arithmetic of sizes."""


def power_of_2(n: int) -> int:
    """The least power of two that is not below n; 1 for n below 1."""
    return 1 << max(n - 1, 0).bit_length()


def ceil_div(n: int, size: int) -> int:
    """Parts of `size` that n needs: n / size rounded up."""
    return -(-n // size)
