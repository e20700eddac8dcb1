"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path, suffix: str = ".part") -> Iterator[Path]:
    """A file to write, beside path: it takes path's place when the block ends, and goes if the block fails.

    Args:
        path: in a folder that exists.
        suffix: of the name meanwhile.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:32]}.", suffix=suffix)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)  # mkstemp makes files that only their owner may read
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
