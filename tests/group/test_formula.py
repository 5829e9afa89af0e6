"""The cost of an exchange: the formula of the documentation against what was measured, and its tables."""

from pathlib import Path

import pytest

from benchmarks.exchange import CLUSTER, MACHINE, MEASURED, fitted, in_two_levels, measure_network, seconds, table


@pytest.mark.parametrize("processes", MEASURED)
def test_the_formula_explains_what_was_measured(processes):
    found = {nbytes: 1e-3 * took for nbytes, took in MEASURED[processes].items()}
    network = fitted(found, processes)
    for nbytes, took in found.items():
        assert 0.8 < seconds(nbytes, processes, network) / took < 1.25
    assert 0.5 < network.message / MACHINE.message < 2
    assert 0.5 < network.rate / MACHINE.rate < 2


def test_two_levels_pay_with_many_processes():
    assert in_two_levels(1.1e6, 4096, 16, CLUSTER, MACHINE) < 0.1 * seconds(1.1e6, 4096, CLUSTER)
    text = (Path(__file__).parents[2] / "docs" / "many-processes.md").read_text()
    for line in table().splitlines():
        assert line in text


def test_the_exchange_of_a_network_is_measured(capsys):
    measure_network("mlp1", repeats=2)
    assert "mlp1, 408576 bytes, 1 processes on 1 machine: measured " in capsys.readouterr().out
