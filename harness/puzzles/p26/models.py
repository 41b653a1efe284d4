"""Test models of puzzle 26's last rung: LayerNorm -> Linear in its usual spellings, and near misses.

They run with a PyTorch stand-in for the operator, so that every dtype is tested without compiling a kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from harness.nn.compile.match import graph_modules
from harness.puzzles.p26.compile_cases import CompileCase

B, S, H, O = 2, 3, 8, 6
PAIR_NODES = ("standin", "getitem")
"""Graph nodes of the operator's stand-in and of the first of its two results."""


class PatternModel(nn.Module):
    """A LayerNorm and Linear layers with random parameters, which `body(model, x)` uses."""

    def __init__(self, body: Callable[["PatternModel", Tensor], Any]):
        super().__init__()
        self.body = body
        generator = torch.Generator().manual_seed(26)

        def normal(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(*shape, generator=generator))

        self.ln, self.a, self.b = nn.LayerNorm(H), nn.Linear(H, O), nn.Linear(H, O, bias=False)
        self.ln.weight, self.ln.bias = normal(H), normal(H)
        self.a.weight, self.a.bias, self.b.weight = normal(O, H), normal(O), normal(O, H)
        self.w, self.c = normal(H, O), normal(O)

    def forward(self, x: Tensor) -> Any:
        return self.body(self, x)


def make_rows(*shape: int) -> Tensor:
    return 1 + torch.randn(*shape, H, generator=torch.Generator().manual_seed(6))


def conv1d(m: PatternModel, x: Tensor) -> Tensor:
    size = (*x.shape[:-1], O)
    return torch.addmm(m.c, m.ln(x).view(-1, H), m.w).view(size)


def share_norm(m: PatternModel, x: Tensor) -> tuple[Tensor, ...]:
    h = m.ln(x)
    return m.a(h), m.b(h), h @ m.w, h + x


def only_shared(m: PatternModel, x: Tensor) -> tuple[Tensor, ...]:
    h = m.ln(x)
    return m.a(h), m.b(h), F.linear(h, m.w.mT)


def aten(m: PatternModel, x: Tensor) -> Tensor:
    h = torch.ops.aten.native_layer_norm.default(x, [H], m.ln.weight, m.ln.bias, 1e-5)[0]
    return torch.ops.aten.linear.default(h, m.a.weight, m.a.bias)


def keywords(m: PatternModel, x: Tensor) -> Tensor:
    h = F.layer_norm(input=x, normalized_shape=(H,), bias=m.ln.bias, weight=m.ln.weight, eps=0.1)
    return F.linear(bias=m.c, input=h, weight=m.b.weight)


def no_eps(m: PatternModel, x: Tensor) -> Tensor:
    """Use an eps of 0, and inputs so small that the default eps would change the result."""
    return F.linear(F.layer_norm(1e-3 * x, (H,), m.ln.weight, m.ln.bias, 0.0), m.a.weight)


def reshaped_twice(m: PatternModel, x: Tensor) -> Tensor:
    """Reshape twice in an order that matters: [B * S, H], then [S, B, H]."""
    return m.a(m.ln(x).view(-1, H).reshape(S, B, H))


def written(m: PatternModel, x: Tensor) -> Tensor:
    x = x.clone()
    h = m.ln(x)
    x.mul_(2.0)
    return m.a(h)


def weight_written(m: PatternModel, x: Tensor) -> Tensor:
    w = m.a.weight * 1.0
    h = m.ln(x)
    w[0] = 0.0
    return F.linear(h, w)


def recompute_norm(m: PatternModel, x: Tensor) -> Tensor:
    return checkpoint(lambda t: m.a(m.ln(t)).tanh(), x, use_reentrant=False)


@dataclass(frozen=True)
class Pattern:
    """A spelling of LayerNorm -> Linear, with the number of pairs in it.

    `transposed` and `num_reshapes` describe the weight and the reshapes between the layers of the first pair.
    """

    label: str
    body: Callable[[PatternModel, Tensor], Any]
    num_pairs: int
    transposed: bool = False
    num_reshapes: int = 0


PATTERNS = (
    Pattern("modules", lambda m, x: m.a(m.ln(x)), 1),
    Pattern("a Linear without bias", lambda m, x: m.b(m.ln(x)), 1),
    Pattern("LayerNorm without parameters", lambda m, x: F.linear(F.layer_norm(x, (H,)), m.b.weight), 1),
    Pattern("LayerNorm without bias", lambda m, x: m.a(F.layer_norm(x, (H,), m.ln.weight)), 1),
    Pattern("arguments by name", keywords, 1),
    Pattern("ATen's functions", aten, 1),
    Pattern("GPT-2's Conv1D, a reshape and an addmm", conv1d, 1, True, 1),
    Pattern("torch.layer_norm @ weight", lambda m, x: torch.layer_norm(x, [H]) @ m.w, 1, True),
    Pattern("an eps of 0", no_eps, 1),
    Pattern("two reshapes", reshaped_twice, 1, False, 2),
    Pattern("torch.matmul(ln, other=weight)", lambda m, x: torch.matmul(m.ln(x), other=m.w), 1, True),
    Pattern(
        "torch.addmm(input=bias, mat1=ln, mat2=weight)",
        lambda m, x: torch.addmm(input=m.c, mat1=m.ln(x[0]), mat2=m.w),
        1,
        True,
    ),
    Pattern("three Linear layers and a residual share a LayerNorm", share_norm, 3),
    Pattern("dropout switched off in between", lambda m, x: m.a(F.dropout(m.ln(x), 0.5, False)), 1),
    Pattern("dropout in between", lambda m, x: m.a(F.dropout(m.ln(x), 0.5)), 0),
    Pattern("relu in between", lambda m, x: m.a(m.ln(x).relu()), 0),
    Pattern("a residual in between", lambda m, x: m.a(m.ln(x) + x), 0),
    Pattern("a slice in between", lambda m, x: m.a(m.ln(x)[:, 1:]), 0),
    Pattern("a reshape that mixes rows", lambda m, x: m.a(m.ln(x).reshape(B, H, S).mT), 0),
    Pattern("RMSNorm, as Llama has it", lambda m, x: m.a(F.rms_norm(x, (H,))), 0),
    Pattern("no LayerNorm", lambda m, x: m.a(x), 0),
)

UNSWAPPABLE = (
    ("x is written to in between", written, "across-mutation"),
    ("the weight is written to in between", weight_written, "across-mutation"),
    ("LayerNorm over two axes", lambda m, x: m.a(F.layer_norm(x, (S, H))), "two-axes"),
    ("addmm with beta=2", lambda m, x: torch.addmm(m.c, m.ln(x).view(-1, H), m.w, beta=2), "factors"),
    ("a weight of three axes", lambda m, x: torch.matmul(m.ln(x), m.w.expand(B, H, O)), "rank"),
    ("a bias of three axes", lambda m, x: torch.addmm(x[0, :, :O], m.ln(x[0]), m.w), "rank"),
)
"""Pairs that must not be swapped: description, body, the mistake of swapping them."""


def make_frozen_model() -> PatternModel:
    model = PatternModel(lambda m, x: m.a(m.ln(x)))
    model.ln.requires_grad_(False)
    return model


def list_swap_cases() -> Sequence[CompileCase]:
    def make_case(label, body, expected_ops, kind="", **options) -> CompileCase:
        model = body if isinstance(body, nn.Module) else PatternModel(body)
        return CompileCase(label, model, (make_rows(B, S),), expected_ops, kind, **options)

    return (
        make_case("LayerNorm -> Linear", lambda m, x: m.a(m.ln(x)), PAIR_NODES),
        make_case("with eps=0.1 and arguments by name", keywords, PAIR_NODES),
        make_case("GPT-2's Conv1D", conv1d, ("reshape", "t", *PAIR_NODES, "view")),
        make_case("q, k and v share a LayerNorm", only_shared, None, "shared-norm"),
        make_case("and a residual reads it too", share_norm, ("layer_norm", *PAIR_NODES, *PAIR_NODES, "t", *PAIR_NODES, "add"), "shared-norm"),
        make_case("without parameters", lambda m, x: F.linear(F.layer_norm(x, (H,)), m.b.weight), PAIR_NODES),
        make_case("with an eps of 0", no_eps, ("mul", *PAIR_NODES)),
        make_case("with two reshapes in between", reshaped_twice, ("reshape", "reshape", *PAIR_NODES)),
        make_case("with more after it", lambda m, x: (m.a(m.ln(x)).tanh() * 2, x), (*PAIR_NODES, "tanh", "mul")),
        make_case("a frozen LayerNorm", make_frozen_model(), PAIR_NODES, "no-gradient"),
        *(
            CompileCase(f"in {dtype}".replace("torch.", ""), PatternModel(lambda m, x: m.a(m.ln(x))).to(dtype), (make_rows(B, S).to(dtype),), PAIR_NODES)
            for dtype in (torch.float64, torch.bfloat16)
        ),
        make_case("inference", lambda m, x: m.a(m.ln(x)), PAIR_NODES, gradients=False),
        make_case("under bfloat16 autocast", lambda m, x: m.a(m.ln(x)), None, "cast-dropped", autocast=True),
        make_case("batch and length change", conv1d, None, "shape-baked", more_inputs=((make_rows(5, 4),), (make_rows(3, 7),)), dynamic=True),
    )  # fmt: skip


# ---- The operator's stand-in --------------------------------------------------------------------------------


def standin(x, ln_weight, ln_bias, weight, bias, eps, algorithm) -> tuple[Tensor, Tensor]:
    """Compute `p26::layernorm_linear` in PyTorch. Raises TypeError if the tensors' dtypes differ."""
    dtypes = [t.dtype for t in (x, ln_weight, ln_bias, weight, bias) if t is not None]
    if len({*dtypes}) > 1:
        raise TypeError(f"the operator's tensors have several dtypes: {', '.join(map(str, dtypes))}")
    with torch.autocast("cpu", enabled=False):
        h = F.layer_norm(x, x.shape[-1:], ln_weight, ln_bias, eps)
        return F.linear(h, weight, bias), x.new_empty(0)


def insert_stand_in(gm: GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
    operator = torch.ops.p26.layernorm_linear.default
    for module in graph_modules(gm):
        for node in module.graph.nodes:
            if node.target is operator:
                node.target = standin
        module.recompile()
    return gm.forward
