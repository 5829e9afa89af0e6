"""A full run fails when a public member has been used by no test."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.recorder import Recorder, all_uses

ROOT = Path(__file__).parent
if os.environ.get("MLCOMPUTE_ENGINE") == "cuda":
    # Tolerances come from float32; products of TensorFloat-32 have tests of their own (tests/devices). In the
    # environment, because some tests start other processes, which must give the same numbers.
    os.environ.setdefault("MLCOMPUTE_MATMUL_PRECISION", "highest")
os.environ.setdefault("MLC_DEBUG", "verify")  # every program a test compiles is checked after every pass
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # Shells start background jobs deaf to Ctrl-C, and their children inherit that; some tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


class UnusedMembers:
    """Records which members this process uses; the process that reports joins what all of them have used.

    The verdict is only given for a full run: every test file collected without an error, nothing deselected (but
    slow tests), nothing stopped early.
    """

    def __init__(self, config: pytest.Config) -> None:
        self.is_worker = hasattr(config, "workerinput")
        #: With pytest-xdist the first process runs no tests itself.
        self.has_workers = not self.is_worker and getattr(config.option, "dist", "no") != "no"
        self.recorder = Recorder()
        self.used = self.recorder.used
        self.files: set[str] = set()
        self.is_partial = any("::" in argument for argument in config.args)
        self.unused: list[str] = []
        if not self.has_workers:
            self.recorder.install()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.is_partial = True
        if report.nodeid.endswith(".py"):
            self.files.add(report.nodeid)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        if any(item.get_closest_marker("slow") is None for item in items):
            self.is_partial = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        found = getattr(node, "workeroutput", {}).get("members")
        if error or found is None:
            self.is_partial = True
        else:
            self.used.update(found["used"])
            self.files.update(found["files"])
            self.is_partial |= found["is_partial"]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        self.recorder.uninstall()
        if self.is_worker:
            session.config.workeroutput["members"] = {  # type: ignore[attr-defined]
                "used": sorted(self.used),
                "files": sorted(self.files),
                "is_partial": self.is_partial,
            }
        elif self._is_full(session):
            self.unused = [use for use in all_uses() if use not in self.used]
            if self.unused:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _is_full(self, session: pytest.Session) -> bool:
        if self.is_partial or session.shouldstop or session.shouldfail or session.config.option.collectonly:
            return False
        if session.exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return False
        root = session.config.rootpath
        return {file.relative_to(root).as_posix() for file in ROOT.rglob("test_*.py")} <= self.files

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.unused:
            terminalreporter.section(f"{len(self.unused)} public members no test uses", red=True)
            for use in self.unused:
                terminalreporter.line(use)


def pytest_configure(config: pytest.Config) -> None:
    if os.environ.get("MLCOMPUTE_ENGINE") == "cuda-emulated":  # an engine that only the tests have
        from tests.devices import cuda_emulator

        cuda_emulator.register()
    config.pluginmanager.register(UnusedMembers(config), "unused-members")


def pytest_make_parametrize_id(val: object) -> str | None:
    """Bytes are named by their length: a test's name must not hold what a file format puts there (times of day)."""
    return f"{len(val)} bytes" if isinstance(val, bytes) else None


def pytest_collection_finish() -> None:
    """What was imported and collected stays to the end: the cyclic collector need not look at half a million objects.

    Many tests call it; each full collection takes a tenth of the time so.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(params=["cpu", "reference"])
def device(request: pytest.FixtureRequest) -> Any:
    """The CPU with the engine that MLCOMPUTE_ENGINE names, and with NumPy's meanings of ops."""
    import mlcompute as mlc
    from mlcompute.devices.reference import Reference

    return mlc.Device.cpu() if request.param == "cpu" else mlc.Device(engine=Reference())
