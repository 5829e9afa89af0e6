"""From a call to its result: storage, requests, compiled graphs, runs, queues. No device's name in it."""
