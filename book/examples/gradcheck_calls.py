"""The essay "What gradcheck misses": a SiLU that gradcheck accepts, and the calls for which gradcheck finds more."""

# ANCHOR: silu
import torch
import torch.nn.functional as F


def memory(t):
    """What a kernel sees, given only an address and a count."""
    return torch.as_strided(t, (t.numel(),), (1,))


class SiLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx, dy):
        (x,) = ctx.saved_tensors
        given, coming = memory(x.contiguous()), memory(dy)
        s = torch.sigmoid(given)
        return (coming * s * (1 + given * (1 - s))).reshape(x.shape)


# ANCHOR_END: silu
# ANCHOR: calls
gradcheck, gradgradcheck = torch.autograd.gradcheck, torch.autograd.gradgradcheck


def strided(t):
    """The same numbers, with gaps between them in memory."""
    if not t.requires_grad:
        return t
    return t.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_()


def list_calls(f, inputs, edges, deep, tall):
    """Return calls by name. `edges` contains 0, 800 and -800, `deep` has more axes, `tall` has thousands of rows."""

    def concatenate(*t):
        return torch.cat([f(*t), f(*(u.flip(0) for u in t))], -1)

    def freeze(i):
        return [t.detach() if i == j else t for j, t in enumerate(inputs)]

    calls = {
        "concatenated": lambda: gradcheck(concatenate, inputs),
        "summed": lambda: gradcheck(lambda *t: f(*t).sum(0), inputs),
        "transposed": lambda: gradcheck(lambda *t: f(*t).transpose(0, 1), inputs),
        "strided inputs": lambda: gradcheck(f, [strided(t) for t in inputs]),
        "edges": lambda: gradcheck(f, edges),
        "more axes": lambda: gradcheck(f, deep),
        "many rows": lambda: gradcheck(lambda *t: f(*t)[-3:], tall, fast_mode=True),
        "second derivative": lambda: gradgradcheck(f, inputs),
    }
    floats = [i for i, t in enumerate(inputs) if t.requires_grad]
    if len(floats) > 1:
        calls |= {f"input {i} frozen": lambda i=i: gradcheck(f, freeze(i)) for i in floats}
    return calls


# ANCHOR_END: calls
