"""Processes that are gone: the others go on, and arrive at the bits of a run that lost nobody."""

import threading

import numpy as np
import pytest

import mlcompute as mlc
from mlcompute.group.link import LostError
from mlcompute.group.local import LocalLink
from tests.group.test_trainer import X, Y, equal, learned, trainer


@pytest.mark.parametrize(
    ("dies", "at", "shares"),
    [
        (1, "before the step", True),
        (2, "between gradients and parameters", True),
        (2, "between gradients and parameters", False),
        (0, "decide", False),
    ],
)
def test_survivors_go_on_with_the_same_bits(monkeypatch, dies, at, shares):
    """Optimizer state of the one that is gone is found in shared memory, or the next process has it."""
    monkeypatch.setenv("MLCOMPUTE_SHARED_MEMORY", str(int(shares)))
    groups = mlc.Group.local(3, timeout=20)
    hub = groups[0].exchange._link.hub
    found, errors = {}, []

    class Gone(BaseException):
        pass

    class Dies(mlc.callbacks.Callback):
        runs_on_every_process = True

        def on_train_batch_begin(self, batch, logs):
            if self.trainer.step == 7 and self.rank == dies:
                if at == "before the step":
                    hub.kill(dies)
                    raise Gone

                def gather(*arguments):
                    hub.kill(dies)
                    raise Gone

                if at == "between gradients and parameters":
                    self.trainer.training._session.in_group.shared.gather = gather

        def on_epoch_end(self, epoch, logs):
            if at == "decide" and self.rank == dies and epoch == 1:
                hub.kill(dies)
                raise Gone

    def work(rank):
        try:
            one = trainer(groups[rank], elastic=True)
            callback = Dies()
            callback.rank = rank
            history = one.fit(X, Y, epochs=3, callbacks=[callback], verbose=0)
            found[rank] = learned(one), history.epochs, groups[rank].size
        except Gone:
            return
        except BaseException as error:
            errors.append(error)
            groups[rank].abort(str(error))

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert not errors, errors[0]
    whole = trainer(mlc.Group.local(1)[0])
    history = whole.fit(X, Y, epochs=3, verbose=0)
    assert sorted(found) == [rank for rank in range(3) if rank != dies]
    for weights, epochs, size in found.values():
        assert size == 2
        assert equal(weights, learned(whole))
        assert [one["loss"] for one in epochs] == [one["loss"] for one in history.epochs]
        np.testing.assert_array_equal([e["accuracy"] for e in epochs], [e["accuracy"] for e in history.epochs])


def test_state_is_lost_with_a_process_and_the_next_one(monkeypatch):
    """Without shared memory each process has the state of the one before it, and no other."""
    monkeypatch.setenv("MLCOMPUTE_SHARED_MEMORY", "0")
    groups, errors = mlc.Group.local(4, timeout=20), {}
    hub = groups[0].exchange._link.hub

    class Dies(mlc.callbacks.Callback):
        runs_on_every_process = True

        def on_train_batch_begin(self, batch, logs):
            if self.trainer.step == 3 and self.rank in (1, 2):
                hub.kill(self.rank)
                raise KeyboardInterrupt

    def work(rank):
        try:
            callback = Dies()
            callback.rank = rank
            trainer(groups[rank], elastic=True).fit(X, Y, epochs=1, callbacks=[callback], verbose=0)
        except BaseException as error:
            errors[rank] = error

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    for rank in (0, 3):
        assert "rank 1 and the next one are gone, and with them their optimizer state" in str(errors[rank])
        assert "start again from the last checkpoint" in str(errors[rank])


def test_processes_that_cannot_agree_on_who_is_left_end(monkeypatch):
    """Sockets, say."""

    def cannot(self):
        raise LostError([])

    monkeypatch.setattr(LocalLink, "survivors", cannot)
    groups, found = mlc.Group.local(2, timeout=20), []
    ready = threading.Barrier(2)

    def work(rank):
        one = trainer(groups[rank], elastic=True)
        ready.wait(30)
        if rank == 1:
            groups[0].exchange._link.hub.kill(1)
            return
        try:
            one.fit(X, Y, epochs=1, verbose=0)
        except mlc.ProcessError as error:
            found.append(error)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    (error,) = found
    assert "rank 1 of 2 ended without a word" in str(error)
    assert "'local' processes cannot agree on who is left" in str(error)
    assert "--with-ft ulfm" in str(error)
    assert error.ranks == (1,)


def test_elastic_needs_a_group():
    with pytest.raises(mlc.DataError, match="elastic is for a group"):
        trainer(None, elastic=True)
