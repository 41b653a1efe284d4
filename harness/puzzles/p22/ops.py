"""The training ops of LayerNorm + Linear as data; imports neither MAX nor torch.

B = batch_size, S = seq_len, H = hidden_dim, O = output_dim.
"""

from harness.spec.ops import ACCUM_DTYPE, Argument, OpSpec, Scalar

EPS = 1e-5
"""Added to the variance: fixed in the public ops, the default in the layer."""

INPUT = Argument(("B", "S", "H"))
OUTPUT = Argument(("B", "S", "O"))
STATISTIC = Argument(("B", "S"), ACCUM_DTYPE)
LN_PARAMETER = Argument(("H",))
LINEAR_BIAS = Argument(("O",))
WEIGHT = Argument(("O", "H"))

FORWARD = OpSpec(
    "layernorm_linear_train",
    writes={"output": OUTPUT, "mean": STATISTIC, "rstd": STATISTIC},
    reads={
        "input": INPUT,
        "ln_weight": LN_PARAMETER,
        "ln_bias": LN_PARAMETER,
        "linear_weight": WEIGHT,
        "linear_bias": LINEAR_BIAS,
    },
    scalars={"eps": Scalar(EPS)},
)
BACKWARD = OpSpec(
    "layernorm_linear_train_backward",
    writes={
        "grad_input": INPUT,
        "grad_ln_weight": LN_PARAMETER,
        "grad_ln_bias": LN_PARAMETER,
        "grad_weight": WEIGHT,
        "grad_bias": LINEAR_BIAS,
    },
    reads={
        "grad_output": OUTPUT,
        "input": INPUT,
        "mean": STATISTIC,
        "rstd": STATISTIC,
        "ln_weight": LN_PARAMETER,
        "ln_bias": LN_PARAMETER,
        "linear_weight": WEIGHT,
    },
)
