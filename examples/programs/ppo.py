"""Proximal policy optimization: one network with two heads, a clipped objective, a value loss and an entropy bonus."""

import numpy as np

import mlcompute as mlc

BATCH, OBSERVED, ACTIONS = 64, 4, 3
CLIP, VALUE_WEIGHT, ENTROPY_WEIGHT = 0.2, 0.5, 0.01


def build() -> mlc.Graph:
    graph = mlc.Graph()
    h = graph.dense(graph.input((BATCH, OBSERVED), "observation"), 32, activation="tanh", name="body")
    graph.dense(h, ACTIONS, name="policy")
    graph.dense(h, 1, name="value")
    return graph


def train(network: mlc.Graph, rollouts, epochs: int = 2) -> list[float]:
    step = mlc.TrainingGraph(optimizer=mlc.AdamOptimizer(learning_rate=3e-3, clip_norm=0.5))
    observation = step.input((BATCH, OBSERVED), "observation")
    action = step.input((BATCH, 1), "action", data_type=mlc.DataType.INT64)
    old, advantage, gain = (step.input((BATCH, 1), name) for name in ("old", "advantage", "gain"))
    logits, value = network(observation)
    log_policy = logits.log_softmax(-1)
    ratio = (log_policy.gather(1, action) - old).exp()
    step.minimize(-mlc.minimum(ratio * advantage, ratio.clip(1 - CLIP, 1 + CLIP) * advantage), name="policy_loss")
    step.minimize((value - gain) ** 2, weight=VALUE_WEIGHT, name="value_loss")
    step.minimize((log_policy.exp() * log_policy).sum(-1), weight=ENTROPY_WEIGHT, name="less_entropy")
    step.compile(device=mlc.Device())
    return [step.execute(batch).result.data.item() for batch in rollouts for _ in range(epochs)]


def data(steps: int = 10):
    """Rollouts of nobody: random numbers, for comparing."""
    rng = np.random.default_rng(0)
    for _ in range(steps):
        action = rng.integers(ACTIONS, size=(BATCH, 1))
        observation, old, advantage, gain = (
            rng.standard_normal((BATCH, size)).astype(np.float32) for size in (OBSERVED, 1, 1, 1)
        )
        old = np.float32(-np.log(ACTIONS)) + 0.1 * old
        yield {"observation": observation, "action": action, "old": old, "advantage": advantage, "gain": gain}


def play(network, steps):
    """Rollouts of the network as it is now: one decision each; the largest of the first three numbers pays 1."""
    actor = mlc.InferenceGraph([network])
    actor.add_inputs({"observation": network.input_tensors[0]})
    policy, value = (network.result_tensors(network.layer(name))[0] for name in ("policy", "value"))
    actor.add_outputs({"policy": policy, "value": value})
    actor.compile(device=mlc.Device())
    rng = np.random.default_rng(0)
    for step in range(steps):
        observation = rng.standard_normal((BATCH, OBSERVED)).astype(np.float32)
        actor.execute({"observation": observation}).wait()
        logits = np.array(policy.data)
        action = (logits + rng.gumbel(size=logits.shape)).argmax(1)[:, None]
        gain = (action == observation[:, :3].argmax(1)[:, None]).astype(np.float32)
        if step % (steps // 5) == 0 or step == steps - 1:
            print(f"rollout {step:4}: {gain.mean():.0%} of the decisions pay")
        old = np.take_along_axis(logits - np.log(np.exp(logits).sum(1, keepdims=True)), action, 1)
        yield {"observation": observation, "action": action, "old": old, "advantage": gain - value.data, "gain": gain}
    assert gain.mean() > 0.8


if __name__ == "__main__":
    mlc.Platform.set_rng_seed_to(0)
    network = build()
    train(network, play(network, 300), epochs=4)
