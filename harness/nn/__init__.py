"""What a model imports: the layers, made of the workbook's kernels.

Nothing is loaded before it is asked for, so that `import harness.nn` does not import PyTorch.
"""

from importlib import import_module

HOMES = {
    "LayerNormLinear": "harness.nn.layers",
    "fused_layernorm_linear": "harness.nn.layers",
    "mojo_workbook": "harness.nn.compile.backend",
    "patch": "harness.nn.patching",
}
__all__ = list(HOMES)


def __getattr__(name: str):
    if name in HOMES:
        return getattr(import_module(HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
