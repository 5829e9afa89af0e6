"""A loss the framework does not have: REINFORCE, its gradient computed here and fed in as dL/d(logits).

A walker learns to cross a grid around walls. `allocate_user_gradient` reserves the place where the gradient of the
logits enters; from there it flows back through the network as any other.
"""

from __future__ import annotations

import numpy as np
from blocks import dense, one_hot

import mlcompute as mlc

GRID = ["....", ".##.", ".#..", "...G"]
SIDE, CELLS = len(GRID), len(GRID) ** 2
GOAL = "".join(GRID).index("G")
OPEN = [cell for cell, sign in enumerate("".join(GRID)) if sign == "."]
MOVES = {"↑": (-1, 0), "↓": (1, 0), "←": (0, -1), "→": (0, 1)}
WALKERS, LONGEST = 32, 16
CAPACITY = WALKERS * LONGEST  # moves in one batch at most; most batches have fewer


def step_to(cell: int, action: int) -> int:
    row, column = divmod(cell, SIDE)
    down, right = list(MOVES.values())[action]
    row, column = row + down, column + right
    inside = 0 <= row < SIDE and 0 <= column < SIDE and GRID[row][column] != "#"
    return row * SIDE + column if inside else cell


def softmax(logits: np.ndarray) -> np.ndarray:
    e = np.exp(logits - logits.max(axis=1, keepdims=True))
    return e / e.sum(axis=1, keepdims=True)


def walk(policy: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, float]:
    """Cells, actions and returns of all moves of all walkers, and the mean length of a walk."""
    cells, actions, returns, lengths = [], [], [], []
    for _ in range(WALKERS):
        cell, length = int(rng.choice(OPEN)), 0
        while cell != GOAL and length < LONGEST:
            cells.append(cell)
            actions.append(rng.choice(4, p=policy[cell]))
            cell, length = step_to(cell, actions[-1]), length + 1
        # Every move costs one; those still to come are what an action is blamed for.
        returns.extend(-float(left) for left in range(length, 0, -1))
        lengths.append(length)
    return np.array(cells), np.array(actions), np.array(returns), float(np.mean(lengths))


def main(rounds: int = 120) -> None:
    mlc.Platform.set_rng_seed_to(3)
    rng = np.random.default_rng(3)
    device = mlc.Device.cpu()
    x = mlc.Tensor(shape=(CAPACITY, CELLS))
    graph = mlc.Graph()
    hidden = graph.node(dense(CELLS, 32), source=x)
    hidden = graph.node(mlc.ActivationLayer.tanh(), source=hidden)
    logits = graph.node(dense(32, 4), source=hidden)

    training = mlc.TrainingGraph([graph], optimizer=mlc.AdamOptimizer(mlc.OptimizerDescriptor(learning_rate=0.02)))
    training.add_inputs({"cell": x})
    training.add_outputs({"logits": logits})
    gradient = training.allocate_user_gradient(logits)
    training.compile(device=device)

    acting = mlc.InferenceGraph([graph])  # the same weights, never copied
    acting.add_inputs({"cell": x})
    acting.compile(device=device)
    every_cell = np.eye(CELLS, dtype=np.float32)
    value = np.full(CELLS, -float(LONGEST))  # what a walk from each cell usually costs
    history = []
    for number in range(rounds):
        policy = softmax(acting.execute({"cell": every_cell}, batch_size=CELLS).result.data.astype(np.float64))
        cells, actions, returns, length = walk(policy, rng)
        history.append(length)
        if number % max(1, rounds // 6) == 0:
            print(f"round {number:3}   mean walk {length:5.2f} moves")

        training.bind_and_write_data(
            {"cell": one_hot(cells, CELLS)}, for_inputs={"cell": x}, to=device, batch_size=len(cells)
        )
        training.execute_forward(batch_size=len(cells))
        # L = -mean(advantage log p(action)), so dL/d(logits) = advantage (p - onehot(action)) / moves.
        advantage = (returns - value[cells])[:, None]
        dlogits = advantage * (softmax(logits.data) - one_hot(actions, 4)) / len(cells)
        training.bind_and_write_data(
            {"gradient": dlogits.astype(np.float32)},
            for_inputs={"gradient": gradient},
            to=device,
            batch_size=len(cells),
        )
        training.execute_gradient(batch_size=len(cells))
        training.execute_optimizer_update()
        for cell in set(cells.tolist()):
            value[cell] += 0.2 * (returns[cells == cell].mean() - value[cell])

    best = softmax(acting.execute({"cell": every_cell}, batch_size=CELLS).result.data).argmax(axis=1)
    arrows = [list(MOVES)[best[cell]] if cell in OPEN else "".join(GRID)[cell] for cell in range(CELLS)]
    print("\n".join("  " + " ".join(arrows[row : row + SIDE]) for row in range(0, CELLS, SIDE)))
    early, late = np.mean(history[:5]), np.mean(history[-5:])
    print(f"mean walk {early:.1f} -> {late:.1f} moves")
    assert late < 0.6 * early


if __name__ == "__main__":
    main()
