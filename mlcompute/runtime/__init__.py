"""From a call to its result: storage, requests, compiled graphs, runs, queues. Independent of the device."""
