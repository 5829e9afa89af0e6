"""What processes run in tests: a few epochs; rank 1 may do something unexpected in the second.

python -m tests.group.program WHAT [FILE]
"""

import os
import signal
import sys
import time

import numpy as np

import mlcompute as mlc

WHAT, FILE = [*sys.argv, "", ""][1:3]
EPOCHS = {"long": 100_000, "survive": 60, "endless": 2}
X = np.random.default_rng(0).standard_normal((240, 8)).astype(np.float32)


class Surprise(mlc.callbacks.Callback):
    runs_on_every_process = True

    def __init__(self, group):
        self.group = group
        self.last = time.monotonic()
        self.longest = 0.0
        self.size = group.size

    def on_train_batch_begin(self, batch, logs):
        now, group = time.monotonic(), self.group
        self.last, self.longest = now, max(self.longest, now - self.last if self.trainer.step > 1 else 0.0)
        if self.trainer.epoch == 1 and batch == 2 and group.rank == 1:
            if WHAT == "kill" or (WHAT == "elastic" and group.size == 3):
                os.kill(os.getpid(), signal.SIGKILL)
            elif WHAT == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif WHAT == "raise":
                raise ValueError("out of luck")
            elif WHAT == "leave":
                sys.exit(0)
        if group.size != self.size:
            self.size = group.size
            if group.is_first:
                print(f"on with {group.size}", flush=True)
        if WHAT in ("long", "survive", "endless"):
            if self.trainer.step == 3 and group.is_first:
                print("running", flush=True)
            time.sleep(0.01)


def trained(group, epochs, surprise):
    mlc.Platform.set_rng_seed_to(1)
    graph = mlc.Graph()
    hidden = graph.dense(graph.input((40, 8), "x"), 32, activation="relu")
    graph.dense(hidden, 4 if WHAT == "graph" and group.rank == 1 else 3)
    elastic = WHAT in ("elastic", "survive")
    trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", learning_rate=0.01, group=group, elastic=elastic)
    saves = FILE if WHAT == "long" else None
    trainer.fit(X, X[:, :3].argmax(1), epochs=epochs, callbacks=[surprise], checkpoint=saves, verbose=0)
    return trainer


def run(group):
    """Train, and say what came of it."""
    noted = Surprise(group)
    try:
        trainer = trained(group, EPOCHS.get(WHAT, 3), noted)
        while WHAT == "endless":  # compile, train and save: a kill may come at any moment
            trainer.save(FILE)
            trainer = trained(group, 2, noted)
    except mlc.ProcessError as error:
        print(f"rank {group.rank}: {type(error).__name__} {error.ranks} {error.message} at {time.time()}", flush=True)
        raise
    if WHAT == "survive":
        print(f"longest {noted.longest:.2f}", flush=True)
    digest = b"".join(array.tobytes() for array in trainer.copy_weights())
    print(f"rank {group.rank} of {group.size}: {np.frombuffer(digest, np.uint32).sum(dtype=np.uint64)}", flush=True)


if __name__ == "__main__":
    world = mlc.Group.world(timeout=2.0 if WHAT == "stop" else 30.0)
    print(f"rank {world.rank} is process {os.getpid()}", flush=True)
    run(world)
