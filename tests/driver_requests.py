"""What programs on the virtual GPU ask its driver for."""

from collections.abc import Callable
from unittest import mock

from harness.vgpu.driver import inprocess
from harness.vgpu.driver.interface import Op


def maps_encoded(call: Callable[[], object]) -> int:
    """How often the driver is asked for a tensor map meanwhile."""
    driver = inprocess.device()
    assert driver is not None, "the program has started it"
    with mock.patch.object(driver, "handle", wraps=driver.handle) as handle:
        call()
    return [asked.args[0] for asked in handle.call_args_list].count(Op.ENCODE_TENSOR_MAP)
