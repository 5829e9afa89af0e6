"""`python -m benchmarks`: every workload in every framework that is installed, interleaved, as a table and as JSON."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.workloads import WORKLOADS

CONTENDERS = {
    "mlcompute": ("ours", "", "mlcompute"),
    "mlcompute split": ("ours", "split", "mlcompute"),
    "torch": ("torch_peer", "", "torch"),
    "torch channels_last": ("torch_peer", "channels_last", "torch"),
    "torch.compile": ("torch_peer", "compile", "torch"),
    "jax": ("jax_peer", "", "jax"),
}


class Contender:
    """A framework running in a process of its own."""

    def __init__(self, name: str, threads: int) -> None:
        module, variant, _ = CONTENDERS[name]
        # The same number of threads for everybody, whatever each framework calls it.
        limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "MLCOMPUTE_NUM_THREADS"), str(threads))
        flags = f"--xla_cpu_multi_thread_eigen={'true' if threads > 1 else 'false'}"
        environment = {**os.environ, **limits, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.worker", module, variant, str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
        )
        self.name = name
        self.ready = self._answer()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": "the process ended"}

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()


def measure(workload: str, names: list[str], threads: int, rounds: int, seconds: float) -> dict[str, Any]:
    """All contenders on one workload, taking turns so that noise hits everybody alike."""
    found: dict[str, Any] = {}
    contenders = []
    for name in names:
        contender = Contender(name, threads)
        built = contender.ask(do="build", workload=workload)
        found[name] = {"import_seconds": contender.ready.get("import_seconds"), **built}
        if "error" in built:
            contender.close()
        else:
            contenders.append(contender)
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            answer = contender.ask(do="run", workload=workload, seconds=seconds)
            times[contender.name] += answer.get("times", [])
            found[contender.name]["peak_kb"] = answer.get("peak_kb")
    for contender in contenders:
        contender.close()
        own = sorted(times[contender.name])
        tenth = own[len(own) // 10], own[-len(own) // 10 - 1]
        found[contender.name] |= {
            "median_ms": 1e3 * statistics.median(own),
            "minimum_ms": 1e3 * own[0],
            "spread_ms": [1e3 * tenth[0], 1e3 * tenth[1]],
            "steps": len(own),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="short rounds: the whole table in about two minutes")
    parser.add_argument("--workloads", default=",".join(WORKLOADS), help="names, separated by commas")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="names, separated by commas")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", default="benchmarks/results.json", help="where the numbers go")
    arguments = parser.parse_args()
    rounds, seconds = (3, 0.3) if arguments.quick else (7, 1.0)
    names = [n for n in arguments.contenders.split(",") if importlib.util.find_spec(CONTENDERS[n][2])]
    if arguments.quick:
        names = [name for name in names if name != "torch.compile"]
    results: dict[str, Any] = {}
    for workload in arguments.workloads.split(","):
        print(f"\n{WORKLOADS[workload].describes}", flush=True)
        found = measure(workload, names, arguments.threads, rounds, seconds)
        results[workload] = found
        ours = found.get("mlcompute", {})
        peers = [f["median_ms"] for n, f in found.items() if not n.startswith("mlcompute") and "median_ms" in f]
        for name, f in found.items():
            if "median_ms" not in f:
                print(f"  {name:<22} {f.get('error', 'failed')[:100]}")
                continue
            low, high = f["spread_ms"]
            print(
                f"  {name:<22} median {f['median_ms']:9.3f} ms   min {f['minimum_ms']:9.3f}   "
                f"10-90 % {low:9.3f} - {high:9.3f}   first step {f['compile_seconds']:6.2f} s   "
                f"peak {f['peak_kb'] // 1024} MB"
            )
        if peers and "median_ms" in ours:
            print(f"  -> {min(peers) / ours['median_ms']:.2f}x the best peer")
    facts = {"machine": platform.processor() or platform.machine(), "threads": arguments.threads, "when": time.time()}
    path = Path(arguments.json)
    path.write_text(json.dumps({"facts": facts, "results": results}, indent=1))
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
