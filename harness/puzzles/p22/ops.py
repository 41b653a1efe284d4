"""The training ops of LayerNorm + Linear as data: names, arguments in order, symbolic shapes.

B = batch_size, S = seq_len, H = hidden_dim, O = output_dim. Importing it loads neither MAX nor torch.
"""

from harness.spec.ops import ACCUM, Argument, OpSpec, Scalar

EPS = 1e-5
"""Added to the variance: the public ops' fixed value, and the default of the layer."""

INPUT = Argument(("B", "S", "H"))
OUTPUT = Argument(("B", "S", "O"))
STATISTIC = Argument(("B", "S"), ACCUM)
BY_INPUT = Argument(("H",))
BY_OUTPUT = Argument(("O",))
WEIGHT = Argument(("O", "H"))

FORWARD = OpSpec(
    "layernorm_linear_train",
    writes={"output": OUTPUT, "mean": STATISTIC, "rstd": STATISTIC},
    reads={
        "input": INPUT,
        "ln_weight": BY_INPUT,
        "ln_bias": BY_INPUT,
        "linear_weight": WEIGHT,
        "linear_bias": BY_OUTPUT,
    },
    scalars={"eps": Scalar(EPS)},
)
BACKWARD = OpSpec(
    "layernorm_linear_train_backward",
    writes={
        "grad_input": INPUT,
        "grad_ln_weight": BY_INPUT,
        "grad_ln_bias": BY_INPUT,
        "grad_weight": WEIGHT,
        "grad_bias": BY_OUTPUT,
    },
    reads={
        "grad_output": OUTPUT,
        "input": INPUT,
        "mean": STATISTIC,
        "rstd": STATISTIC,
        "ln_weight": BY_INPUT,
        "ln_bias": BY_INPUT,
        "linear_weight": WEIGHT,
    },
)
