"""Several machines with several processes each: who sends to whom, and who hears of a failure elsewhere."""

import threading

import pytest

import mlcompute as mlc
from mlcompute.group.local import LocalLink
from tests.group.threads import BATCH, T, X, network, run_group


@pytest.fixture(autouse=True)
def machines_of_two(monkeypatch):
    monkeypatch.setenv("MLCOMPUTE_SHARED_MEMORY", "2")


def step(training, number=0):
    training.execute({"x": X[number]}, {"t": T[number]}, batch_size=BATCH)


def test_a_process_sends_to_one_of_every_other_machine(monkeypatch):
    """As docs/many-processes.md counts them: 2 (M - 1) messages between M machines, a shard in each."""
    sent, send = {rank: [] for rank in range(6)}, LocalLink.send

    def noted(self, to, data):
        sent[self.rank].append((to, data.nbytes))
        return send(self, to, data)

    monkeypatch.setattr(LocalLink, "send", noted)

    def work(group):
        training = network()
        training.compile(device=mlc.Device.cpu(), group=group)
        step(training)
        sent[group.rank].clear()  # nobody else adds to it
        step(training, 1)
        return list(sent[group.rank]), training._session.in_group.buckets[0]

    for rank, (messages, bucket) in enumerate(run_group(6, work, slices=6)):
        shards = [4 * (last - first) for first, last in map(bucket.shard, range(6))]
        others = [(rank + 2) % 6, (rank + 4) % 6]
        expected = [(to, nbytes) for to in others for nbytes in (shards[to], shards[rank])]
        headers = [(to, 48) for to in others for _ in range(2)]
        assert sorted(messages) == sorted([*headers, *((to, nbytes) for to, nbytes in expected if nbytes)])


def ends(size, work, timeout):
    """What every rank ends with, where they fail."""
    groups, found = mlc.Group.local(size, timeout=timeout), {}

    def run(group):
        try:
            work(group)
        except mlc.ProcessError as error:
            found[group.rank] = error

    threads = [threading.Thread(target=run, args=(group,), daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("between", [False, True])
def test_all_machines_hear_of_a_process_that_is_gone(between):
    """Before a step, or after its machine has met, before it has sent anything to others."""

    def work(group):
        training = network()
        training.compile(device=mlc.Device.cpu(), group=group)
        step(training)
        if group.rank == 1:
            exchange, hub = training._session.in_group.shared, group.exchange._link.hub
            if not between:
                hub.kill(1)
                return

            def gone(*arguments):
                hub.kill(1)
                raise KeyboardInterrupt

            exchange._send = gone
            with pytest.raises(KeyboardInterrupt):
                step(training)
            return
        step(training)

    found = ends(4, work, 30.0)
    assert sorted(found) == [0, 2, 3]
    assert all(error.ranks == (1,) and error.is_lost for error in found.values())


def test_all_machines_hear_who_is_silent():
    """Rank 0 waits for rank 1 itself; the others, who wait for rank 0 or each other, leave it the time to say so."""
    over = threading.Event()

    def work(group):
        training = network()
        training.compile(device=mlc.Device.cpu(), group=group)
        assert training._session.in_group.shared._waits == 0.5
        if group.rank == 1:
            over.wait(60)
            return
        try:
            if group.rank == 0:
                group.exchange.timeout = 1.0
            step(training)
        finally:
            if group.rank == 0:
                over.set()

    found = ends(4, work, 30.0)
    assert sorted(found) == [0, 2, 3]
    for error in found.values():
        assert "rank 1 did not answer rank 0 within" in str(error)
