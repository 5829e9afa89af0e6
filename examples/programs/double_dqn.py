"""Double DQN: the network chooses the next action, a slower copy of it says what that action is worth."""

import numpy as np

import mlcompute as mlc

BATCH, STATES, ACTIONS, GAMMA, COPY_EVERY = 32, 8, 3, 0.9, 4


def build() -> tuple[mlc.Graph, mlc.Graph]:
    networks = mlc.Graph(), mlc.Graph()
    for graph in networks:
        h = graph.dense(graph.input((BATCH, STATES), "state"), 32, activation="relu", name="hidden")
        graph.dense(h, ACTIONS, name="values")
    return networks


def train(q: mlc.Graph, target: mlc.Graph, batches) -> list[float]:
    step = mlc.TrainingGraph(optimizer=mlc.AdamOptimizer(learning_rate=2e-3))
    state, following = step.input((BATCH, STATES), "state"), step.input((BATCH, STATES), "following")
    action = step.input((BATCH, 1), "action", data_type=mlc.DataType.INT64)
    reward, goes_on = step.input((BATCH, 1), "reward"), step.input((BATCH, 1), "goes_on")
    best = q(following, updates=False).argmax(-1, keepdims=True)
    worth = target(following, updates=False).gather(1, best)
    goal = (reward + GAMMA * goes_on * worth).detach()
    step.loss(q(state).gather(1, action), goal, "huber")
    step.compile(device=mlc.Device())

    losses = []
    for k, batch in enumerate(batches):
        if k % COPY_EVERY == 0:
            mlc.from_state_dict(target, mlc.to_state_dict(q))
        losses.append(step.execute(batch).result.data.item())
    return losses


def data(steps: int = 10):
    """A corridor: left, stay or right; the rightmost place pays 1 and ends the walk."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        place, action = rng.integers(STATES - 1, size=BATCH), rng.integers(ACTIONS, size=BATCH)
        after = np.clip(place + action - 1, 0, STATES - 1)
        ends = after == STATES - 1
        yield {
            "state": np.eye(STATES, dtype=np.float32)[place],
            "following": np.eye(STATES, dtype=np.float32)[after],
            "action": action[:, None],
            "reward": ends[:, None].astype(np.float32),
            "goes_on": 1 - ends[:, None].astype(np.float32),
        }


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    q, target = build()
    train(q, target, data(2000))
    player = mlc.Trainer(q, loss="mse")
    values = player.predict(np.eye(STATES, dtype=np.float32))[:-1]
    print("what the best action is worth:", " ".join(f"{value:.2f}" for value in values.max(1)))
    print("what it should be:            ", " ".join(f"{GAMMA**k:.2f}" for k in range(STATES - 2, -1, -1)))
    assert (values.argmax(1) == 2).all(), "always to the right"
