"""Training steps side by side: mlcompute and its peers on the same workloads, in one run."""
