"""PyTorch's own sample inputs of its operators and modules; its lists of them take seconds to import, which only their tests wait for."""

import warnings
from collections.abc import Callable
from typing import Any


def of_operator(name: str) -> Callable:
    """(device, dtype, options) -> an operator's samples."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
    return next(info for info in op_db if info.name == name).sample_inputs


def of_module(module: type, **options: Any) -> list:
    """The samples of a module's own tests."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_modules import module_db
    info = next(info for info in module_db if info.module_cls is module)
    return info.module_inputs_func(info, **options)
