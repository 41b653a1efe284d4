"""The training ops of LayerNorm + Linear as data: names, arguments in order, symbolic shapes.

B = batch_size, S = seq_len, H = hidden_dim, O = output_dim. Loads neither MAX nor torch.
"""

from harness.spec.ops import OpSpec

EPS = 1e-5
"""What is added to the variance: the public ops' fixed value, and the default of the layer."""

STATISTICS = ("mean", "rstd", "row_sums")
FORWARD = OpSpec(
    "layernorm_linear_train",
    writes={"output": "BSO", "mean": "BS", "rstd": "BS"},
    reads={"input": "BSH", "ln_weight": "H", "ln_bias": "H", "linear_weight": "OH", "linear_bias": "O"},
    eps=True,
    statistics=STATISTICS,
)
BACKWARD = OpSpec(
    "layernorm_linear_train_backward",
    writes={
        "grad_input": "BSH",
        "grad_ln_weight": "H",
        "grad_ln_bias": "H",
        "grad_weight": "OH",
        "grad_bias": "O",
    },
    reads={
        "grad_output": "BSO",
        "input": "BSH",
        "mean": "BS",
        "rstd": "BS",
        "ln_weight": "H",
        "ln_bias": "H",
        "linear_weight": "OH",
    },
    statistics=STATISTICS,
)
