"""The swap of LayerNorm -> Linear as an Inductor pattern, and how often it is found: in inference, and in training.

The pass counts, and then stops the compilation: what Inductor would make of the rest is not needed here.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.pattern_matcher import PatternMatcherPass, fwd_only, joint_fwd_bwd, register_replacement

N, H, O = 4, 8, 6


@torch.library.custom_op("book::layernorm_linear", mutates_args=())
def layernorm_linear(x: Tensor, g: Tensor, b: Tensor, w: Tensor, c: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, (H,), g, b), w, c)


@layernorm_linear.register_fake
def _(x, g, b, w, c):
    return x.new_empty(*x.shape[:-1], O)


# ANCHOR: pattern
def search(x, g, b, w, c):
    return F.linear(F.layer_norm(x, (H,), g, b), w, c)


def replacement(x, g, b, w, c):
    return torch.ops.book.layernorm_linear(x, g, b, w, c)


def patterns_of(trace):
    """The pattern, traced with example inputs: of one size, one dtype, one eps."""
    patterns = PatternMatcherPass()
    examples = [
        torch.empty(*size, requires_grad=trace is joint_fwd_bwd)
        for size in ((N, H), (H,), (H,), (O, H), (O,))
    ]
    register_replacement(search, replacement, examples, trace, patterns)
    return patterns


# ANCHOR_END: pattern


class Counted(Exception):
    """The pass has run."""


class Count(CustomGraphPass):
    """Runs a pattern over the joint graph of forward and backward pass, and stops with the number of matches."""

    def __init__(self, patterns):
        self.patterns = patterns

    def __call__(self, graph):
        raise Counted(self.patterns.apply(graph))

    def uuid(self):
        return None


def matches(trace, training, model):
    """How often the pattern is found in a model."""
    torch._dynamo.reset()
    with config.patch(joint_custom_pre_pass=Count(patterns_of(trace))):
        try:
            with torch.set_grad_enabled(training):
                torch.compile(model)(torch.randn(N, H, requires_grad=training))
        except Exception as error:
            return getattr(error, "inner_exception", error).args[0]


def main():
    pair = nn.Sequential(nn.LayerNorm(H), nn.Linear(H, O))
    other_eps = nn.Sequential(nn.LayerNorm(H, eps=1e-6), nn.Linear(H, O))
    print("inference, traced for inference:          ", matches(fwd_only, False, pair))
    print("training, traced for inference:           ", matches(fwd_only, True, pair))
    print("inference, with another eps in the model: ", matches(fwd_only, False, other_eps))


if __name__ == "__main__":
    main()
