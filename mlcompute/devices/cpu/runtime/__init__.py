"""What runs programs: threads, entries of a tape, facts of the machine."""
