"""What a user says: every layer and its descriptor, a file per family."""
