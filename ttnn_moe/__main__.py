"""python -m ttnn_moe: the ttnn-moe command."""

from .cli import main

if __name__ == "__main__":
    main()
