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
group = mlc.Group.world(timeout=2.0 if WHAT == "stop" else 30.0)
mlc.Platform.set_rng_seed_to(1)
rng = np.random.default_rng(0)
x = rng.standard_normal((240, 8)).astype(np.float32)
graph = mlc.Graph()
hidden = graph.dense(graph.input((40, 8), "x"), 32, activation="relu")
graph.dense(hidden, 4 if WHAT == "graph" and group.rank == 1 else 3)


class Surprise(mlc.callbacks.Callback):
    runs_on_every_process = True

    def on_train_batch_begin(self, batch, logs):
        if self.trainer.epoch == 1 and batch == 2 and group.rank == 1:
            if WHAT == "kill" or (WHAT == "elastic" and group.size == 3):
                os.kill(os.getpid(), signal.SIGKILL)
            elif WHAT == "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            elif WHAT == "raise":
                raise ValueError("out of luck")
            elif WHAT == "leave":
                sys.exit(0)
        if WHAT == "long":
            if self.trainer.step == 3 and group.is_first:
                print("running", flush=True)
            time.sleep(0.01)


trainer = mlc.Trainer(graph, loss="softmax_cross_entropy", learning_rate=0.01, group=group, elastic=WHAT == "elastic")
began = time.time()
try:
    trainer.fit(
        x,
        x[:, :3].argmax(1),
        epochs=100_000 if WHAT == "long" else 3,
        callbacks=[Surprise()],
        checkpoint=FILE if WHAT == "long" else None,
        verbose=0,
    )
except mlc.ProcessError as error:
    print(f"rank {group.rank}: {type(error).__name__} {error.ranks} {error.message}", flush=True)
    raise
digest = b"".join(array.tobytes() for array in trainer.copy_weights())
print(f"rank {group.rank} of {group.size}: {np.frombuffer(digest, np.uint32).sum(dtype=np.uint64)}", flush=True)
