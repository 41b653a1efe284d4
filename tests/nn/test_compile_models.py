"""Real models from `transformers`, made of small configurations with random weights: how many pairs are swapped, by the
backend and by `replace`, and that losses over five steps and gradients are those of eager mode.

Skipped where `transformers` is not installed: `uv sync --extra models` brings it.
"""

import copy
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from harness.nn import mojo_workbook, replace

WIDTH, HEADS, LAYERS, WORDS = 16, 2, 2, 40
SMALL = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
}


def transformers() -> Any:
    """The package, imported only by the tests that use it."""
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
"""All that the backend swaps, by name."""


def model_of(name: str):
    torch.manual_seed(0)
    model = MODELS[name][0]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # LayerNorms begin with ones and zeros, behind which mistakes hide
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.weight.normal_(1, 0.3, generator=generator)
                module.bias.normal_(0, 0.3, generator=generator)
    return model.train()


def loss_of(call, name: str, dtype=torch.float32) -> torch.Tensor:
    """The loss of one batch, written out: the models' own loss functions break the graph."""
    generator = torch.Generator().manual_seed(2)
    if name == "vit":
        logits = call(torch.randn(3, 3, 8, 8, generator=generator).to(dtype)).logits
        return F.cross_entropy(logits, torch.tensor([0, 1, 1]))
    ids = torch.randint(0, WORDS, (2, 9), generator=generator)
    logits = call(ids).logits
    return F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())


def compiled(model, **options):
    """The model under the backend with an eager tail, and the reports of its graphs."""
    torch._dynamo.reset()
    reports = []
    options = {"tail": "eager", "report": reports.append} | options
    return torch.compile(model, backend=mojo_workbook, options=options), reports


def gradients(call, model, name, dtype=torch.float32):
    model.zero_grad()
    loss_of(call, name, dtype).backward()
    return {key: None if p.grad is None else p.grad.double() for key, p in model.named_parameters()}


def assert_near(ours, eager, truth) -> None:
    """Gradients as near to float64's as eager mode's, by name; none where eager mode has none."""
    for key, exact in truth.items():
        assert (ours[key] is None) == (eager[key] is None), key
        if exact is not None:
            scale = exact.abs().max().clamp(min=1e-12)
            far, near = ((g[key] - exact).abs().max() / scale for g in (ours, eager))
            assert far <= 8 * near + 1e-5, (key, far, near)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_near_to_float64_as_eager_mode_s(name):
    model = model_of(name)
    call, reports = compiled(model)
    eager, ours = gradients(model, model, name), gradients(call, model, name)
    wide = copy.deepcopy(model).double()
    truth = gradients(wide, wide, name, torch.float64)
    swaps = sum(len(report.swaps) for report in reports)
    assert swaps == MODELS[name][1], [r.lines() for r in reports]
    assert_near(ours, eager, truth)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_a_head_goes_with_the_model_s_own_loss_unless_its_logits_are_returned(name):
    model = model_of(name)
    # Without one GPT-2 warns, which breaks the graph before the loss.
    model.loss_type = model.loss_type or "ForCausalLM"
    ids = torch.randint(0, WORDS, (2, 9), generator=torch.Generator().manual_seed(2))
    labels = ids.where(ids % 5 > 0, -100)

    def gradients_of(model, call):
        model.zero_grad()
        call(model).backward()
        return {key: None if p.grad is None else p.grad.double() for key, p in model.named_parameters()}

    def loss(model):
        return model(ids, labels=labels).loss

    call, reports = compiled(loss, head=True)
    ours, eager = gradients_of(model, call), gradients_of(model, loss)
    assert [(len(report.heads), report.heads_left) for report in reports] == [(1, [])]
    assert_near(ours, eager, gradients_of(copy.deepcopy(model).double(), loss))
    call, reports = compiled(lambda model: model(ids, labels=labels), head=True)
    call(model)
    assert [why for report in reports for _, why in report.heads_left] == ["its logits are returned"]


@pytest.mark.parametrize("name", ["gpt2", "vit"])
@pytest.mark.parametrize("way", ["compile", "replace"])
def test_five_steps_of_training(name, way):
    def losses(swapped: bool) -> list[float]:
        model = model_of(name)
        call = model
        if swapped and way == "compile":
            call, _ = compiled(model)
        elif swapped:
            assert len(replace(model, PAIRS[name])) == MODELS[name][1]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        values = []
        for _ in range(5):
            optimizer.zero_grad()
            loss = loss_of(call, name)
            loss.backward()
            optimizer.step()
            values.append(loss.item())
        return values

    eager, ours = losses(False), losses(True)
    assert eager[-1] < eager[0]
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(eager), rtol=2e-5, atol=2e-5)
