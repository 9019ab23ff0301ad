"""The command line: the table of commands, and what becomes of errors.

Every command has a file of its own here, with its options beside its code. What a user got wrong
is one sentence on standard error and exit code 2. Heavy imports stay inside the commands, so that
`entp --help` answers at once.
"""

from __future__ import annotations

import io
import os
import re
import sys
from collections.abc import Callable

from entp import __version__
from entp.cli.bench import bench_command
from entp.cli.compare import compare_command
from entp.cli.data import data_command
from entp.cli.demo import demo_command
from entp.cli.evaluate import evaluate_command
from entp.cli.export import export_command
from entp.cli.generate import generate_command
from entp.cli.help import command_list
from entp.cli.llm import llm_command
from entp.cli.lm_eval import lm_eval_command
from entp.cli.parse import HELP
from entp.cli.report import report_command
from entp.cli.reproduce import reproduce_command
from entp.cli.tasks import tasks_command
from entp.cli.theory import theory_command
from entp.cli.train import train_command
from entp.errors import DeviceFailed, InputError, TrainingStopped, one_of

COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "demo": demo_command,
    "train": train_command,
    "evaluate": evaluate_command,
    "compare": compare_command,
    "generate": generate_command,
    "export": export_command,
    "lm-eval": lm_eval_command,
    "llm": llm_command,
    "data": data_command,
    "reproduce": reproduce_command,
    "report": report_command,
    "bench": bench_command,
    "theory": theory_command,
    "tasks": tasks_command,
}
"""Each takes the words after its name and returns the exit code; its docstring is its line of
help."""


def main(argv: list[str] | None = None) -> int:
    """The exit code of a command: 0 done, 1 training stopped, 2 bad input, 128 + signal
    interrupted."""
    args = sys.argv[1:] if argv is None else argv
    _open_closed()
    _write_any_text()
    try:
        return _run(args)
    except InputError as error:
        return _complain(str(error), 2)
    except TrainingStopped as error:
        _complain(str(error), 1)
        if isinstance(error, DeviceFailed):
            _leave_at_once(1)
        return 1
    except KeyboardInterrupt:
        return _complain("interrupted", 130)
    except BrokenPipeError:
        sys.stderr.close()
        return 141
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        return _complain(
            f"there is not enough memory for a model, batch or task of this size ({error}).", 2
        )
    except OSError as error:  # a path that cannot be read or written
        where = error.filename or "a file"
        return _complain(f"{where} cannot be used: {error.strerror}. Give another path.", 2)


def _open_closed() -> None:
    """Streams that whoever started this process has closed, such as by 2>&-, lead nowhere: a file
    would else get their number, and what is said be written into it."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115 (until it ends)


def _write_any_text() -> None:
    """What the terminal's encoding has no character for is written as its number: it may stand in
    the name of a folder, and is no reason to fail at the end of a training."""
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
        stream.reconfigure(errors="backslashreplace")


def _run(args: list[str]) -> int:
    """The exit code of the command that `args` name."""
    if not args or args[0] in (*HELP, "--help-all"):
        print(_help(), flush=True)
        return 0
    if args[0] == "--version":
        print(f"entp {__version__}", flush=True)
        return 0
    if args[0] not in COMMANDS:
        raise one_of("command", args[0], COMMANDS)
    return COMMANDS[args[0]](args[1:])


def _help() -> str:
    lines = [(command.__doc__ or "").partition(": ") for command in COMMANDS.values()]
    return command_list({usage: text for usage, _, text in lines})


def _complain(message: str, code: int) -> int:
    """The exit code, after one line on standard error."""
    print(f"entp: {message}", file=sys.stderr)
    return code


def _is_out_of_memory(error: Exception) -> bool:
    found = re.search("out of memory|allocate memory", str(error))
    return isinstance(error, MemoryError) or found is not None


def _leave_at_once(code: int) -> None:
    """End the process without giving anything back to a GPU that failed: torch would abort with a
    stack."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
