"""Tables, charts and figures of the pages, drawn from records and from the constants of the code."""
