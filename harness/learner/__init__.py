"""The learner's own files: blanks, hints, progress, restoring."""
