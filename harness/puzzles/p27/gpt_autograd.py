"""The GPT's training step with autograd, eager or compiled, on the memory of a `State`."""

import torch
from torch import Tensor

from harness.puzzles.p27.autograd import Model, make_parts
from harness.puzzles.p27.gpt import State
from harness.puzzles.p27.step_parts import ADAM_EPS, BETAS, DECAY, LIMIT


class AutogradTrainer:
    """Trains a state with autograd."""

    def __init__(self, state: State, use_compile: bool = False):
        self.state = state
        self.device = state.master.device
        self.p = {name: view.detach().requires_grad_() for name, view in state.parameters.items()}
        matrices = [t for t in self.p.values() if t.dim() > 1]
        vectors = [t for t in self.p.values() if t.dim() < 2]
        groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, betas=BETAS, eps=ADAM_EPS, fused=True)
        means, squares = state.layout.make_views(state.mean), state.layout.make_views(state.square)
        for name, leaf in self.p.items():
            step = torch.tensor(float(state.steps), device=self.device)
            self.optimizer.state[leaf] = {"step": step, "exp_avg": means[name], "exp_avg_sq": squares[name]}
        model = Model(make_parts(state.sizes.heads), records_parts=False)
        self.loss = torch.compile(model.loss, dynamic=False) if use_compile else model.loss

    def step(self, excerpt: Tensor, learning_rate: float) -> Tensor:
        """Run one training step; return the loss before the update, on the device."""
        self.state.steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        gpu = self.device.type == "cuda"
        with torch.autocast(self.device.type, torch.bfloat16, enabled=gpu):
            loss = self.loss(excerpt[:, :-1], excerpt[:, 1:], self.p)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.p.values(), LIMIT)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()
