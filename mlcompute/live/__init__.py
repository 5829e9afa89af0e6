"""Pages served on this machine alone: a training that goes on, and the folder of runs."""
