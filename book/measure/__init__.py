"""What makes the records: times and memory on a GPU, what commands print, recorded runs."""
