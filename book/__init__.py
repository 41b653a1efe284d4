"""The book: `build` makes its pages, `figures` their tables and pictures from records, `measure` the records."""
