"""A learner's own files: blanks, hints, progress, putting things back."""
