"""Small models of `transformers` with random weights: how many pairs the backend and `replace` replace; losses over five
steps and gradients are as in eager mode.

Skipped where `transformers` is not installed: `uv sync --extra models` brings it.
"""

import copy
from typing import Any

import pytest
import torch
from compile_checks import compile_model
from torch.nn import functional as F

from harness.nn import replace

WIDTH, HEADS, LAYERS, WORDS = 16, 2, 2, 40
SMALL = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
}


def transformers() -> Any:
    """Return the package, imported only by the tests that use it."""
    return pytest.importorskip(
        "transformers", reason="transformers is not installed: it comes with the extra `models`"
    )


def gpt2():
    config = transformers().GPT2Config(
        vocab_size=WORDS, n_positions=12, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return transformers().GPT2LMHeadModel(config)


def bert():
    config = transformers().BertConfig(
        vocab_size=WORDS, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SMALL
    )
    return transformers().BertForMaskedLM(config)


def vit():
    config = transformers().ViTConfig(
        image_size=8, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SMALL
    )
    return transformers().ViTForImageClassification(config)


def llama():
    config = transformers().LlamaConfig(
        vocab_size=WORDS, max_position_embeddings=12, num_key_value_heads=HEADS, use_cache=False, **SMALL
    )
    return transformers().LlamaForCausalLM(config)


MODELS = {
    # (model, pairs that the backend swaps)
    "gpt2": (gpt2, 2 * LAYERS + 1),
    "bert": (bert, 4 * LAYERS + 2),
    "vit": (vit, 4 * LAYERS + 1),
    "llama": (llama, 0),
}
PAIRS = {
    "gpt2": [("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc"), ("transformer.ln_f", "lm_head")],
    "vit": [
        *(("layernorm_before", f"attention.{name}_proj") for name in "qkv"),
        ("layernorm_after", "mlp.fc1"),
        ("vit.layernorm", "classifier"),
    ],
}
"""All pairs that the backend replaces, by name."""


def make_model(name: str):
    torch.manual_seed(0)
    model = MODELS[name][0]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # the initial ones and zeros of LayerNorm would hide mistakes
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.weight.normal_(1, 0.3, generator=generator)
                module.bias.normal_(0, 0.3, generator=generator)
    return model.train()


def compute_loss(call, name: str, dtype=torch.float32) -> torch.Tensor:
    """Return the loss of one batch, without the models' loss functions, which break the graph."""
    generator = torch.Generator().manual_seed(2)
    if name == "vit":
        logits = call(torch.randn(3, 3, 8, 8, generator=generator).to(dtype)).logits
        return F.cross_entropy(logits, torch.tensor([0, 1, 1]))
    ids = torch.randint(0, WORDS, (2, 9), generator=generator)
    logits = call(ids).logits
    return F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())


def compute_gradients(loss, model) -> dict:
    model.zero_grad()
    loss().backward()
    return {key: None if p.grad is None else p.grad.double() for key, p in model.named_parameters()}


def assert_near(ours, eager, truth) -> None:
    """Assert that gradients are as accurate as those of eager mode, by name."""
    for key, exact in truth.items():
        assert (ours[key] is None) == (eager[key] is None), key
        if exact is not None:
            scale = exact.abs().max().clamp(min=1e-12)
            far, near = ((g[key] - exact).abs().max() / scale for g in (ours, eager))
            assert far <= 8 * near + 1e-5, (key, far, near)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_accurate_as_eager(name):
    model = make_model(name)
    call, reports = compile_model(model, "eager", fullgraph=False)
    eager = compute_gradients(lambda: compute_loss(model, name), model)
    ours = compute_gradients(lambda: compute_loss(call, name), model)
    wide = copy.deepcopy(model).double()
    truth = compute_gradients(lambda: compute_loss(wide, name, torch.float64), wide)
    swaps = sum(len(report.swaps) for report in reports)
    assert swaps == MODELS[name][1], [r.lines() for r in reports]
    assert_near(ours, eager, truth)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_head_is_replaced_with_the_models_loss(name):
    model = make_model(name)
    # Without one GPT-2 warns, which breaks the graph before the loss.
    model.loss_type = model.loss_type or "ForCausalLM"
    ids = torch.randint(0, WORDS, (2, 9), generator=torch.Generator().manual_seed(2))
    labels = ids.where(ids % 5 > 0, -100)

    def loss(model):
        return model(ids, labels=labels).loss

    call, reports = compile_model(loss, "eager", fullgraph=False, head=True)
    ours, eager = (compute_gradients(lambda f=f: f(model), model) for f in (call, loss))
    assert [(len(report.heads), report.heads_left) for report in reports] == [(1, [])]
    wide = copy.deepcopy(model).double()
    assert_near(ours, eager, compute_gradients(lambda: loss(wide), wide))
    call, reports = compile_model(
        lambda model: model(ids, labels=labels), "eager", fullgraph=False, head=True
    )
    call(model)
    assert [why for report in reports for _, why in report.heads_left] == ["its logits are returned"]


@pytest.mark.parametrize("name", ["gpt2", "vit"])
@pytest.mark.parametrize("method", ["compile", "replace"])
def test_five_steps_of_training(name, method):
    def losses(swapped: bool) -> list[float]:
        model = make_model(name)
        call = model
        if swapped and method == "compile":
            call, _ = compile_model(model, "eager", fullgraph=False)
        elif swapped:
            assert len(replace(model, PAIRS[name])) == MODELS[name][1]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        values = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = compute_loss(call, name)
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        return values

    eager, ours = losses(False), losses(True)
    assert eager[-1] < eager[0]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(eager), rtol=2e-5, atol=2e-5)
