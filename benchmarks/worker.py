"""One framework in a process of its own: builds steps on request and times them. Speaks JSON lines with the runner."""

from __future__ import annotations

import importlib
import json
import os
import resource
import sys
import time
from typing import Any


def main() -> None:
    framework, variant, threads = sys.argv[1], sys.argv[2], int(sys.argv[3])
    start = time.perf_counter()
    if framework == "torch_peer":
        import torch

        torch.set_num_threads(threads)
    module = importlib.import_module(f"benchmarks.{framework}")
    answer({"ready": True, "import_seconds": time.perf_counter() - start})
    steps: dict[str, Any] = {}
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(serve(module, variant, steps, request))
        except Exception as error:
            answer({"error": f"{type(error).__name__}: {error}"})


def serve(module: Any, variant: str, steps: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    name = request["workload"]
    if request["do"] == "build":
        start = time.perf_counter()
        steps[name] = module.step(name, variant)
        steps[name]()
        seconds = time.perf_counter() - start
        for _ in range(3):
            steps[name]()
        return {"compile_seconds": seconds}
    times = []
    end = time.perf_counter() + request["seconds"]
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        steps[name]()
        times.append(time.perf_counter() - start)
    return {"times": times, "peak_kb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}


def answer(message: dict[str, Any]) -> None:
    os.write(OUT, (json.dumps(message) + "\n").encode())


if __name__ == "__main__":
    # Frameworks print to standard output; the conversation keeps a descriptor of its own.
    OUT = os.dup(1)
    os.dup2(2, 1)
    main()
