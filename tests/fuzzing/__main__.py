"""python -m tests.fuzzing FOLDER [--target NAME] [--runs N] [--seconds S]: see `campaign.py` for what is in the folder.

Without a target all of them take turns, until each has reached its goal: ten million runs altogether. Needs atheris
(the extra `fuzz`), which guides the fuzzer to code it has not reached yet.
"""

from __future__ import annotations

import argparse
import functools
import gc
import os
import signal
import sys
from pathlib import Path
from types import FrameType

_LONGEST = 8192


def main() -> int:
    """Fuzz one target for a while, then go on with the next in the same process."""
    arguments = _arguments()
    try:
        import atheris
    except ImportError:
        print("fuzzing needs atheris: pip install 'mlcompute[fuzz]'", file=sys.stderr)
        return 2
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with atheris.instrument_imports(include=["mlcompute"]):
        from tests.fuzzing.campaign import Campaign, Round
        from tests.fuzzing.plainly import seconds_of
        from tests.fuzzing.scratch import remove_scratch
        from tests.fuzzing.targets import TARGETS
        from tests.fuzzing.watch import Watch

        campaign = Campaign(arguments.folder)
        goals = {name: kind.goal for name, kind in TARGETS.items()}
        name = arguments.target or campaign.next_target(goals)
        if name is None:
            print((arguments.folder / "counts.json").read_text())
            return 0
        watch = Watch(TARGETS[name](), campaign.findings(name), functools.partial(seconds_of, name))
        corpus = campaign.corpus(watch)
        watch.run(b"\1")  # imports what is imported at first use
    gc.collect()
    gc.freeze()  # or the collector walks through all that was imported in the middle of a run
    this_round = Round(campaign, watch, arguments.seconds, arguments.runs or campaign.runs_left(name, goals))

    def stop(number: int, frame: FrameType | None) -> None:
        this_round.write_down()
        remove_scratch()
        os._exit(0)

    def one(data: bytes) -> None:
        if this_round.run(data):
            return
        if arguments.target:
            stop(0, None)
        # A fuzzer never returns; the next one takes over the process, which so keeps its number.
        os.execv(sys.executable, [sys.executable, "-m", "tests.fuzzing", *sys.argv[1:]])

    options = [
        sys.argv[0], str(corpus), f"-max_len={_LONGEST}", f"-artifact_prefix={arguments.folder}/died-in-{name}-",
        # Time and memory are watched here, by processor time and run by run.
        "-timeout=1000000", "-rss_limit_mb=0", "-malloc_limit_mb=0", "-detect_leaks=0", "-verbosity=0", "-handle_int=0",
        "-handle_term=0",
    ]  # fmt: skip
    atheris.Setup(options, one)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    atheris.Fuzz()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzzing", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", help="this one alone, for one round")
    parser.add_argument("--runs", type=int, default=0, help="at most so many in a round (default: up to the goal)")
    parser.add_argument("--seconds", type=float, default=300.0, help="processor time of a round (default: 300)")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
