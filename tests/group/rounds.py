"""Many kills in one launch: round after round, four of the processes that are left are a group that loses some.

python -m tests.group.rounds WHAT FILE ROUNDS

WHAT and FILE are as in program.py. ROUNDS says who is killed: "7;2,0" are a round that loses process 7, and one that
loses 2, then 0. Importing a package costs much more than a round, and a round costs one process per kill. The others of
a round train on in the next one. It begins when there is a file FILE.NUMBER; until then, they sleep.
"""

import os
import sys
import time
from contextlib import suppress

import mlcompute as mlc
from mlcompute.group.messages import MessageExchange
from mlcompute.group.mpi import MPILink, load_mpi
from tests.group.program import FILE, run


def rounds_of(size, victims):
    """The four of each round, by their number in the launch."""
    alive = list(range(size))
    for lost in victims:
        yield alive[:4]
        alive = [one for one in alive if one not in lost]


def main():
    victims = [[int(one) for one in part.split(",")] for part in sys.argv[3].split(";")]
    mpi = load_mpi()
    world = mpi.COMM_WORLD
    me = world.Get_rank()
    print(f"rank {me} is process {os.getpid()}", flush=True)
    members = list(rounds_of(world.Get_size(), victims))
    # Before anybody is lost: from then on, no call of all processes would return.
    links = [world.Split(0 if me in four else mpi.UNDEFINED, me) for four in members]
    for number, four in enumerate([*members, []]):  # nobody ends before all are done: mpirun would end the others
        while not os.path.exists(f"{FILE}.{number}"):
            time.sleep(0.02)
        if me in four:
            with suppress(mlc.ProcessError):
                run(mlc.Group(MessageExchange(MPILink(mpi, links[number]), 30.0)))
    sys.stdout.flush()
    os._exit(1)  # MPI's own end would wait for those that are gone


if __name__ == "__main__":
    main()
