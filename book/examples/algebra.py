"""LayerNorm after the product: what the algebra that makes it possible costs in accuracy.

Four ways to the same output, each with inputs of one dtype and float32 sums, against float64.
"""

import torch
import torch.nn.functional as F

ROWS, H, O, EPS = 512, 768, 768, 1e-5


# ANCHOR: ways
def in_order(x, gamma, W):
    """Normalise, round, multiply."""
    return F.linear(F.layer_norm(x, [H], gamma, eps=EPS), W)


def after(x, gamma, W, *, rounded_sum=True, two_passes=True):
    """Multiply the raw x by gamma W, subtract mean times the row sums of gamma W, scale by rstd."""
    exact = W.float() * gamma.float()
    factor = exact.to(x.dtype)  # what the tensor core multiplies with
    row_sums = (factor.float() if rounded_sum else exact).sum(1)
    mean = x.float().mean(-1, keepdim=True)
    if two_passes:
        variance = (x.float() - mean).square().mean(-1, keepdim=True)
    else:  # all that the tiles of a product can sum on the way
        variance = (x.float().square().mean(-1, keepdim=True) - mean * mean).clamp(min=0)
    product = x.float() @ factor.float().T
    return ((product - mean * row_sums) * torch.rsqrt(variance + EPS)).to(x.dtype)


# ANCHOR_END: ways


WAYS = {
    "in order": in_order,
    "after": after,
    "sum of unrounded": lambda *inputs: after(*inputs, rounded_sum=False),
    "one-pass variance": lambda *inputs: after(*inputs, two_passes=False),
}


def largest_error(way, x, gamma, W) -> float:
    """The largest error of a way, as a part of the largest output."""
    truth = in_order(x.double(), gamma.double(), W.double())
    return float((way(x, gamma, W).double() - truth).abs().max() / truth.abs().max())


if __name__ == "__main__":
    print("dtype     mean/deviation", *(f"{name:>17}" for name in WAYS))
    for dtype in (torch.float32, torch.bfloat16):
        for offset in (0, 1, 10, 100, 1000):
            torch.manual_seed(22)
            x = (torch.randn(ROWS, H) + offset).to(dtype)
            gamma, W = (1 + 0.1 * torch.randn(H)).to(dtype), (torch.randn(O, H) / H**0.5).to(dtype)
            errors = (f"{largest_error(way, x, gamma, W):.1e}" for way in WAYS.values())
            print(f"{str(dtype)[6:]:9} {offset:14}", *(f"{error:>17}" for error in errors))
