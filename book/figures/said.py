"""What the pages say of records and is more than one number of one: ratios over sizes, extremes, sums. Pages name these
functions in references (`book/build/references.py`)."""
