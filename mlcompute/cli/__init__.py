"""The command `mlcompute`: train, evaluate, predict, inspect, profile, check, convert, doctor, devices, bench."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Sequence

from mlcompute.cli.answer import FAILED, INTERRUPTED, SUCCESS, USAGE, Answer, fitted, wrapped
from mlcompute.cli.streams import show_everything
from mlcompute.errors import Error

#: One file per command: what it is called, what it does, in the order of the help.
COMMANDS = {
    "train": "train a model and keep what it learned",
    "evaluate": "measure a trained model on data",
    "predict": "let a trained model answer, into a file",
    "inspect": "look into a checkpoint, a model file or an ONNX model",
    "profile": "show where the time of a step goes",
    "check": "check a model's gradients numerically, layer by layer",
    "convert": "convert between checkpoint, ONNX and plain safetensors",
    "doctor": "tell what of an ONNX model imports and trains",
    "devices": "list what this machine has to compute with",
    "bench": "time training steps beside PyTorch and JAX",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code."""
    show_everything()
    given = list(sys.argv[1:] if arguments is None else arguments)
    args = argparse.Namespace(command="", debug=False, json=False)
    try:
        parser = _parser(given)
        args = parser.parse_args(given)
        if not args.command:
            parser.print_help()
            return USAGE
        answer: Answer = args.run(args)
        _show(answer, args.json)
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        said = f"mlcompute {args.command}".rstrip() + ": interrupted"
        print(f"{said}; {error}" if str(error) else said, file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return SUCCESS
    except Exception as error:
        return _fail(error, args)
    return answer.code


def _parser(given: Sequence[str]) -> argparse.ArgumentParser:
    from mlcompute import __version__

    parser = argparse.ArgumentParser(
        prog="mlcompute",
        description="Train, look into and convert networks of ML Compute's training graphs.",
        epilog="`mlcompute COMMAND --help` tells all about a command. Exit codes: 0 done, 1 failed, 2 wrong usage, "
        "130 interrupted, 143 terminated.",
    )
    parser.add_argument("--version", action="version", version=f"mlcompute {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, help_ in COMMANDS.items():
        command = commands.add_parser(
            name,
            help=help_,
            description=help_[0].upper() + help_[1:] + ".",
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name in given:  # only the command that is called needs its module, and what that imports
            module = importlib.import_module(f"mlcompute.cli.{name}")
            module.add_arguments(command)
            command.set_defaults(run=module.run)
            command.epilog = "\n  ".join(["examples:", *module.EXAMPLES])
        general = command.add_argument_group("general")
        general.add_argument("--json", action="store_true", help="answer with one JSON object on standard output")
        general.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _fail(error: Exception, args: argparse.Namespace) -> int:
    if args.debug:
        traceback.print_exc()
    said = str(error) or type(error).__name__
    if not isinstance(error, _EXPECTED):
        said = f"{type(error).__name__}: {said}\n  fix  --debug shows where; if your file is right, report it"
    if args.json:
        message, *_ = said.splitlines()
        facts = {**error.facts, "fix": error.fix} if isinstance(error, Error) else {}
        print(json.dumps({"error": type(error).__name__, "message": message, **facts}))
    else:
        said = f"mlcompute {args.command}: {said}"
        print(wrapped(said, shutil.get_terminal_size().columns) if sys.stderr.isatty() else said, file=sys.stderr)
    return FAILED


#: What a user can bring about; anything else says that it should not have happened.
_EXPECTED = (Error, OSError, ImportError, ValueError, TypeError, MemoryError)


def _show(answer: Answer, as_json: bool) -> None:
    parts = [json.dumps(answer.data, indent=2)] if as_json else [fitted(answer.table), answer.text]
    for part in parts:
        if part:
            print(part)
