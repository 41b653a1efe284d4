"""A SiLU of one's own under `check_backward`: its backward pass is a loop over memory, as a kernel's is."""

import torch.nn.functional as F
from gradcheck_calls import SiLU

# ANCHOR: report
from harness.testing import check_backward

report = check_backward(SiLU.apply, reference=F.silu, inputs={"x": ("N", "H")})
print(report)
# ANCHOR_END: report
