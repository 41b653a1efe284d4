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

WIDTH, HEADS, LAYERS, VOCABULARY = 16, 2, 2, 40
SMALL_CONFIG = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 32,
}


def import_transformers() -> Any:
    """Import the optional package."""
    return pytest.importorskip(
        "transformers", reason="transformers is not installed: it comes with the extra `models`"
    )


def make_gpt2():
    config = import_transformers().GPT2Config(
        vocab_size=VOCABULARY, n_positions=12, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return import_transformers().GPT2LMHeadModel(config)


def make_bert():
    config = import_transformers().BertConfig(
        vocab_size=VOCABULARY, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SMALL_CONFIG
    )
    return import_transformers().BertForMaskedLM(config)


def make_vit():
    config = import_transformers().ViTConfig(
        image_size=8, patch_size=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **SMALL_CONFIG
    )
    return import_transformers().ViTForImageClassification(config)


def make_llama():
    config = import_transformers().LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=12,
        num_key_value_heads=HEADS,
        use_cache=False,
        **SMALL_CONFIG,
    )
    return import_transformers().LlamaForCausalLM(config)


MODELS = {
    # (model, number of replaced pairs)
    "gpt2": (make_gpt2, 2 * LAYERS + 1),
    "bert": (make_bert, 4 * LAYERS + 2),
    "vit": (make_vit, 4 * LAYERS + 1),
    "llama": (make_llama, 0),
}
PAIRS = {
    "gpt2": [("ln_1", "attn.c_attn"), ("ln_2", "mlp.c_fc"), ("transformer.ln_f", "lm_head")],
    "vit": [
        *(("layernorm_before", f"attention.{name}_proj") for name in "qkv"),
        ("layernorm_after", "mlp.fc1"),
        ("vit.layernorm", "classifier"),
    ],
}
"""Names of the pairs that the backend replaces."""


def make_model(name: str):
    torch.manual_seed(0)
    model = MODELS[name][0]()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():  # initial ones and zeros would hide errors
        for module in model.modules():
            if isinstance(module, torch.nn.LayerNorm):
                module.weight.normal_(1, 0.3, generator=generator)
                module.bias.normal_(0, 0.3, generator=generator)
    return model.train()


def compute_loss(call, name: str, dtype=torch.float32) -> torch.Tensor:
    """Return the loss of one batch; the models' loss functions would break the graph."""
    generator = torch.Generator().manual_seed(2)
    if name == "vit":
        logits = call(torch.randn(3, 3, 8, 8, generator=generator).to(dtype)).logits
        return F.cross_entropy(logits, torch.tensor([0, 1, 1]))
    ids = torch.randint(0, VOCABULARY, (2, 9), generator=generator)
    logits = call(ids).logits
    return F.cross_entropy(logits.flatten(0, 1), ids.roll(-1, 1).flatten())


def compute_gradients(loss, model) -> dict:
    model.zero_grad()
    loss().backward()
    return {key: None if p.grad is None else p.grad.double() for key, p in model.named_parameters()}


def assert_as_accurate_as_eager(actual, eager, truth) -> None:
    """Compare errors with those of eager mode, for dicts name -> gradient."""
    for key, reference in truth.items():
        assert (actual[key] is None) == (eager[key] is None), key
        if reference is not None:
            scale = reference.abs().max().clamp(min=1e-12)
            error, eager_error = ((g[key] - reference).abs().max() / scale for g in (actual, eager))
            assert error <= 8 * eager_error + 1e-5, (key, error, eager_error)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_as_accurate_as_eager(name):
    model = make_model(name)
    call, reports = compile_model(model, "eager", fullgraph=False)
    eager = compute_gradients(lambda: compute_loss(model, name), model)
    actual = compute_gradients(lambda: compute_loss(call, name), model)
    model64 = copy.deepcopy(model).double()
    truth = compute_gradients(lambda: compute_loss(model64, name, torch.float64), model64)
    num_replaced = sum(len(report.swaps) for report in reports)
    assert num_replaced == MODELS[name][1], [r.format_lines() for r in reports]
    assert_as_accurate_as_eager(actual, eager, truth)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert"])
def test_head_is_replaced_with_the_models_loss(name):
    model = make_model(name)
    # Without an attention mask GPT-2 warns, which breaks the graph before the loss.
    model.loss_type = model.loss_type or "ForCausalLM"
    ids = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(2))
    labels = ids.where(ids % 5 > 0, -100)

    def loss(model):
        return model(ids, labels=labels).loss

    call, reports = compile_model(loss, "eager", fullgraph=False, head=True)
    actual, eager = (compute_gradients(lambda f=f: f(model), model) for f in (call, loss))
    assert [(len(report.heads), report.skipped_heads) for report in reports] == [(1, [])]
    model64 = copy.deepcopy(model).double()
    assert_as_accurate_as_eager(actual, eager, compute_gradients(lambda: loss(model64), model64))
    call, reports = compile_model(lambda m: m(ids, labels=labels), "eager", fullgraph=False, head=True)
    call(model)
    assert [reason for report in reports for _, reason in report.skipped_heads] == ["its logits are outputs"]


@pytest.mark.parametrize("name", ["gpt2", "vit"])
@pytest.mark.parametrize("method", ["compile", "replace"])
def test_training_losses_match_eager(name, method):
    def train(replaced: bool) -> list[float]:
        model = make_model(name)
        call = model
        if replaced and method == "compile":
            call, _ = compile_model(model, "eager", fullgraph=False)
        elif replaced:
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

    eager_losses, actual_losses = train(False), train(True)
    assert eager_losses[-1] < eager_losses[0]
    torch.testing.assert_close(torch.tensor(actual_losses), torch.tensor(eager_losses), rtol=2e-5, atol=2e-5)
