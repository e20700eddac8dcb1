"""The ttnn-moe command, also as python -m ttnn_moe."""

from __future__ import annotations

import sys

from .command_line import guarded


def main() -> None:
    """Entry point of the script."""
    sys.exit(guarded(_command))


def _command() -> int:
    from . import cli

    return cli.run()


if __name__ == "__main__":
    main()
