"""The gate of every command: each outcome is an exit code and at most one message.

Exit codes: 0; 1, a check failed, the output cannot be written to its end, or this package is wrong; 2, an option is
wrong (a place that cannot be written is) or something is missing here; 130, Ctrl-C. Nothing slow is imported before
Ctrl-C is answered here.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from .errors import BackendUnavailable, CheckpointError, ContractError, RequestError, TtnnMoeError
from .visible import said, visible

if TYPE_CHECKING:
    import typer

FAILED, USER_ERROR, INTERRUPTED = 1, 2, 130
INPUT_ERRORS = (BackendUnavailable, CheckpointError, ContractError, RequestError)
LINE = 1000


def guarded(command: Callable[[], int]) -> int:
    """Exit code of a command; what goes wrong is one message on stderr."""
    interrupted = False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True  # an import may turn the exception into another
        if _imports(frame):  # or swallow it, as torch's import of numpy does, and the command would go on
            _end_output()
            _say("interrupted")
            os._exit(INTERRUPTED)
        raise KeyboardInterrupt

    handler = None
    try:
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            handler = signal.signal(signal.SIGINT, interrupt)
        _ready_streams()
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: _say(f"warning: {message}")
            code = command()
        if interrupted:  # typer ends some interrupts by itself
            raise KeyboardInterrupt
        sys.stdout.flush()
        return code
    except BaseException as error:
        if handler is not None:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        unwritten = _end_output() or _of_a_write(error)
        if interrupted or isinstance(error, KeyboardInterrupt):
            _say("interrupted")
            return INTERRUPTED
        if isinstance(error, BrokenPipeError):  # the reader (head, less) went away
            return FAILED
        if unwritten is not None:
            _say(f"the output cannot be written: {unwritten.strerror or unwritten}")
            return FAILED
        if isinstance(error, SystemExit):
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        return _told(error)
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)


def _imports(frame: FrameType | None) -> bool:
    """Whether a module is being imported by the command."""
    while frame is not None and frame.f_code is not guarded.__code__:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _lacks_memory(error: BaseException) -> bool:
    """Whether torch could not get memory: OutOfMemoryError of a GPU, RuntimeErrors of others and of the CPU."""
    words = ("DefaultCPUAllocator", "out of memory")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


def _told(error: BaseException) -> int:
    if isinstance(error, TtnnMoeError | OSError | MemoryError):
        text = str(error) or "out of memory"
        if isinstance(error, INPUT_ERRORS):  # a name of the user's may hold newlines; details are indented
            text = re.sub(r"\n(?!  )", r"\\n", text)
        _say(text)
        return USER_ERROR
    wanted = os.environ.get("TTNN_MOE_LOG") or {"-v", "--verbose"}.intersection(sys.argv)
    if wanted:
        traceback.print_exception(error)
    if _lacks_memory(error):
        text = " ".join(str(error).split())[: LINE // 2]
        _say(f"out of memory; got {text}; to fix it: free memory, ask for smaller sizes, or take another device")
        return USER_ERROR
    where = traceback.extract_tb(error.__traceback__)[-1:]
    place = "".join(f" at {os.path.basename(frame.filename)}:{frame.lineno}" for frame in where)
    text = " ".join(said(error).split())
    _say(f"a mistake in this package{place}: {text[: LINE // 2]}; to fix it: report it, with the output of --verbose.")
    return FAILED


def _ready_streams() -> None:
    """A closed stream takes everything. What a stream's encoding lacks is escaped."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))
        reconfigure = getattr(getattr(sys, name), "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _end_output() -> OSError | None:
    """Send what was printed. If that fails, drop it, since Python would complain again at exit, and return why."""
    try:
        sys.stdout.flush()
    except OSError as error:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        return error
    return None


def _of_a_write(error: BaseException) -> OSError | None:
    """The error, if it is one of writing to an open file or stream: such an error names no file."""
    ours = isinstance(error, TtnnMoeError)
    return error if isinstance(error, OSError) and error.errno and error.filename is None and not ours else None


def _say(text: str) -> None:
    """On stderr, long lines cut; control characters are shown, not sent."""
    lines = (line if len(line) <= LINE else f"{line[:LINE]}... ({len(line) - LINE} more)" for line in text.split("\n"))
    try:
        print(f"ttnn-moe: {visible(chr(10).join(lines))}", file=sys.stderr, flush=True)
    except OSError:  # nobody listens: the exit code remains
        pass


def needs(context: typer.Context, option: str, *names: str) -> None:
    """Raise RequestError if the command line gives any of these parameters, which change nothing without `option`."""
    given = [f"--{name.replace('_', '-')}" for name in names if _is_given(context, name)]
    if given:
        words = " and ".join(given)
        raise RequestError(
            f"without {option}, {words} would change nothing", got=words, remedy=f"give {option}, or leave {words} out"
        )


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name != "DEFAULT"


def run_app(app: typer.Typer, args: Sequence[str], name: str) -> int:
    """Exit code of a typer application.

    Raises:
        RequestError: the command line is wrong. Other errors pass.
    """
    import typer

    # typer exports only some of its subclasses; click has it in some versions, typer itself in others
    refused: Any = typer.BadParameter.__mro__[2]
    try:
        code = app(args=list(args), prog_name=name, standalone_mode=False, help_option_names=["-h", "--help"])
    except typer.Abort:
        raise KeyboardInterrupt from None
    except refused as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else name
        words = " ".join(error.format_message().split())
        raise RequestError(words, remedy=f"see {path} --help") from None
    return code if isinstance(code, int) else 0
