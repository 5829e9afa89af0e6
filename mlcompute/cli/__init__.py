"""The command `mlcompute`: train, launch, evaluate, predict, inspect, profile, check, convert, doctor, devices, ..."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import math
import shlex
import shutil
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from mlcompute.cli.answer import FAILED, INTERRUPTED, SUCCESS, USAGE, Answer, fitted, wrapped
from mlcompute.cli.parsing import Parser, UsageError, meant
from mlcompute.cli.streams import plain_warnings, show_everything, stop_showing
from mlcompute.errors import Error

#: One file per command: what it is called, what it does, in the order of the help.
COMMANDS = {
    "train": "train a model and keep what it learned",
    "sweep": "try settings, each in a process of its own",
    "runs": "list training runs, or compare some of them",
    "report": "write the page about a run again, or one about several",
    "new": "write a recipe out as a script to go on from",
    "view": "show runs in the browser, also while they train",
    "launch": "start a program on several processes that train together",
    "evaluate": "measure a trained model on data",
    "predict": "predictions of a trained model, on the screen or in a file",
    "inspect": "look into a checkpoint, a model file or an ONNX model",
    "profile": "show where the time of a step goes",
    "check": "check a model's gradients numerically, layer by layer",
    "convert": "convert between checkpoint, ONNX and plain safetensors",
    "doctor": "tell what of an ONNX model imports and trains",
    "devices": "list what this machine has to compute with",
    "bench": "time training steps beside PyTorch, JAX, tinygrad and MLX",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    show_everything()
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = argparse.Namespace(command="", debug="--debug" in given, json="--json" in given)
    try:
        args = _read(given)
        if not args.command:
            return USAGE
        elsewhere = contextlib.redirect_stdout(sys.stderr) if args.json else contextlib.nullcontext()
        with plain_warnings(), elsewhere:
            answer: Answer = args.run(args)  # what a model file prints is no part of a JSON answer
        _show(answer, args.json)
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        said = f"interrupted; {error}" if str(error) else "interrupted"
        return _fail(said, args, {"error": "KeyboardInterrupt", "message": said}, INTERRUPTED)
    except UsageError as error:
        args.command = error.command
        return _fail(f"error: {error}", args, {"error": "UsageError", "message": str(error)}, USAGE, error.usage)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        stop_showing()
        return SUCCESS
    except Exception as error:
        if args.debug:
            traceback.print_exc()
        said = str(error) or type(error).__name__
        if not isinstance(error, _EXPECTED):
            said = f"{type(error).__name__}: {said}\n  fix  --debug shows where; if your file is right, report it"
        said = said.removeprefix(f"{args.command}: ")
        message, *_ = said.splitlines()
        facts = {**error.facts, "fix": error.fix} if isinstance(error, Error) else {}
        return _fail(said, args, {"error": type(error).__name__, "message": message, **facts}, FAILED)
    return answer.code


def _read(given: Sequence[str]) -> argparse.Namespace:
    """What the words mean; the help when there are none, UsageError when they mean nothing."""
    from mlcompute import __version__

    parser = Parser(
        prog="mlcompute",
        description="Train, look into and convert networks of ML Compute's training graphs.",
        epilog="`mlcompute COMMAND --help` tells all about a command. Exit codes: 0 done, 1 failed, 2 wrong usage, "
        "130 interrupted, 143 terminated.",
    )
    parser.add_argument("--version", action="version", version=f"mlcompute {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    called = next((word for word in given if not word.startswith("-")), "")
    rest: list[str] = []
    if called == "sweep" and "--" in given:  # what follows is for another command
        at = given.index("--")
        given, rest = given[:at], list(given[at + 1 :])
    for name, help_ in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=help_,
            description=help_[0].upper() + help_[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == called:  # only the command that is called needs its module, and what that imports
            module = importlib.import_module(f"mlcompute.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
            command.epilog = "\n  ".join(["examples:", *module.EXAMPLES])
        _add_general(command.add_argument_group("general"), argparse.SUPPRESS)
    _add_general(parser, False)
    if called and called not in COMMANDS:
        parser.error(f"there is no command {called!r}{meant(called, COMMANDS) or '; --help lists them'}")
    args, unknown = parser.parse_known_args(given)
    if unknown:
        behind = f"; options of `mlcompute train` stand at the end: -- {shlex.join(unknown)}"
        (commands.choices[called] if called else parser).refuse(unknown, behind if called == "sweep" else "")
    if rest:
        args.rest = rest
    if not args.command and args.json:
        parser.error("no command was given")
    if not args.command:
        parser.print_help()
    args.typed = shlex.join(["mlcompute", *given, *(["--", *rest] if rest else [])])
    return args


def _add_general(parser: argparse._ActionsContainer, default: object) -> None:
    """Options that may stand before the command and after it: there, they are only set when they are given."""
    parser.add_argument("--json", action="store_true", default=default, help="answer with one JSON object")
    parser.add_argument("--debug", action="store_true", default=default, help="show the traceback of an error")


def _fail(said: str, args: argparse.Namespace, data: dict[str, str], code: int, usage: str = "") -> int:
    """Tell what went wrong, as JSON where that is asked for and can be written."""
    if args.json:
        with contextlib.suppress(OSError):
            print(json.dumps(data), flush=True)
            return code
    said = f"mlcompute {args.command}".rstrip() + f": {said}"
    said = wrapped(said, shutil.get_terminal_size().columns) if sys.stderr.isatty() else said
    print(f"{usage}{said}", file=sys.stderr)
    return code


#: What a user can bring about; anything else says that it should not have happened.
_EXPECTED = (Error, OSError, ImportError, ValueError, TypeError, MemoryError)


def _show(answer: Answer, as_json: bool) -> None:
    parts = (
        [json.dumps(_finite(answer.data), indent=2, allow_nan=False)]
        if as_json
        else [fitted(answer.table), answer.text]
    )
    for part in parts:
        if part:
            print(part)


def _finite(data: Any) -> Any:
    """JSON has no NaN and no infinity: null stands for them."""
    if isinstance(data, dict):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data
