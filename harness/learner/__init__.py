"""A learner's files: blanks, hints, progress, and restoring them."""
