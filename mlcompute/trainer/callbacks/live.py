"""The live report in the browser."""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from typing import TYPE_CHECKING

from mlcompute.trainer.callbacks.callback import Logs
from mlcompute.trainer.callbacks.watching import GradientWatch

if TYPE_CHECKING:
    from mlcompute.live.server import Server
    from mlcompute.live.training import TrainingSite
    from mlcompute.runs import Run


class Live(GradientWatch):
    """Serves the report to this machine's browser while training: curves, gradients, time, memory; save and stop.

    port   0: a free one, another with every Live
    every  gradient norms of every so many steps, as `GradientWatch`
    save   where the button saves to; by default live.safetensors, in the run's folder or the working directory
    run    the mlc.Run it belongs to; hyperparameters and data are then on the page
    title  the heading

    The address, `live.address`, is printed when training begins. It holds a random token, and the server listens on the
    loopback interface alone. Stop does what Ctrl-C does. The page stays when training has ended, and can be loaded
    again as long as the program runs.
    """

    def __init__(
        self,
        port: int = 0,
        every: int = 100,
        save: str | os.PathLike[str] | None = None,
        run: Run | None = None,
        title: str = "",
    ) -> None:
        super().__init__(every)
        self.port, self.title = port, title
        self._run = run
        folder = "." if run is None else run.folder
        self._path = os.path.join(folder, "live.safetensors") if save is None else os.fspath(save)
        self._server: Server | None = None
        self._site: TrainingSite | None = None
        self._wants_save = False

    @property
    def address(self) -> str:
        """What to open in a browser; empty before training begins."""
        return self._server.address if self._server is not None else ""

    def on_train_begin(self, logs: Logs) -> None:
        from mlcompute.live.server import Server
        from mlcompute.live.training import TrainingSite

        group = self.trainer.group
        if group is not None and not group.is_first:
            return
        if self._site is not None:
            self._site.over.set()
        self._wants_save = False
        title = self.title or (self._run.name if self._run is not None else "Training")
        # In a group all processes save together, and a button is pressed on one of them.
        save = self._ask_to_save if group is None or group.size == 1 else None
        self._site = TrainingSite(self.trainer, title, self._run, save)
        if self._server is None:
            self._server = Server(self._site, self.port)
            atexit.register(_close, weakref.ref(self))
        self._server.site = self._site
        print(f"live: {self.address}", file=sys.stderr, flush=True)

    def _ask_to_save(self) -> str:
        self._wants_save = True
        return f"saving after this step, to {self._path}"

    def on_train_batch_begin(self, batch: int, logs: Logs) -> None:
        if self._wants_save:
            self._wants_save = False
            self.trainer.save_when_settled(self._path)

    def close(self) -> None:
        """Tell the pages that are open how it ended, and serve no more."""
        if self._site is not None:
            self._site.over.set()
        if self._server is not None:
            self._server.close()
            self._server = None


def _close(live: weakref.ref[Live]) -> None:
    found = live()
    if found is not None:
        found.close()
