"""The record of the last run on a real GPU: failed tests in it fail here; what has changed since is warned of."""

import json
import warnings

import gpu_runs


def test_no_test_failed_on_the_gpu_of_the_record():
    """Whoever changes a kernel may have no GPU at hand, so that an old record is no failure."""
    record = json.loads(gpu_runs.RECORD.read_text(encoding="utf-8"))
    assert not record["failed"], (record["device"], record["which_failed"])
    assert record["passed"], "no test has run on a GPU"
    if changed := gpu_runs.changed_since(record):
        warnings.warn(f"changed since the tests ran on a GPU: {', '.join(changed)}", stacklevel=1)
