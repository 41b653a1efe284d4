"""Private names of torch that this one lacks."""

import pytest

from harness.nn import private


def test_a_name_that_torch_lacks_is_named():
    with pytest.raises(
        ImportError, match=r"torch\._C\._no_such_name is missing in torch \d.*has no attribute"
    ):
        private.private("_C._no_such_name")
