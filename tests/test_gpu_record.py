"""The record of the last GPU run: a failure in it fails, and later changes of its files cause a warning."""

import json
import warnings

import gpu_runs


def test_record_has_no_failed_test():
    """A stale record only warns, since the author of a change may have no GPU."""
    record = json.loads(gpu_runs.RECORD.read_text(encoding="utf-8"))
    assert not record["failed"], (record["device"], record["which_failed"])
    assert record["passed"], "no test has run on a GPU"
    if changed := gpu_runs.list_changes_since(record):
        warnings.warn(f"changed since the tests ran on a GPU: {', '.join(changed)}", stacklevel=1)
