"""patch(model) on models of `transformers`, made of small configurations with random weights: which pairs the kernels compute, and
that loss and every gradient stay. A function in PyTorch stands in for the kernels.

Skipped where `transformers` is not installed: `uv sync --extra models` brings it.
"""

import copy

import pytest
import torch
from patch_checks import assert_same, fresh, transformers
from torch import nn

from harness.nn import patch

pytestmark = pytest.mark.long

WIDTH, LAYERS, WORDS = 16, 2, 40
SMALL = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {
    **SMALL,
    "vocab_size": WORDS,
    "max_position_embeddings": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IMAGE = {**SMALL, "image_size": 8, "patch_size": 4}


def model_of(name: str, **config):
    """A model of `transformers` by the name of its class; its configuration's is the same up to the task."""
    kind = getattr(transformers(), name)
    return kind(kind.config_class(**config))


def ids(*shape):
    return torch.arange(18).view(2, 9) % WORDS


def of_text(model):
    return model(input_ids=ids())[0]


def of_image(model):
    pixels = torch.arange(2 * 3 * 8 * 8, dtype=torch.float64).view(2, 3, 8, 8).sin()
    return model(pixel_values=pixels)[0]


def of_sound(model):
    features = torch.arange(2 * 8 * 20, dtype=torch.float64).view(2, 8, 20).sin()
    return model(input_features=features, decoder_input_ids=ids()[:, :5])[0]


MODELS = {
    # (model, its output, pairs)
    "GPT-2": (
        lambda: model_of("GPT2LMHeadModel", vocab_size=WORDS, n_positions=16, n_embd=WIDTH, n_layer=LAYERS, n_head=2),
        of_text, 2 * LAYERS,
    ),
    "OPT": (
        lambda: model_of("OPTForCausalLM", **TEXT, ffn_dim=32, word_embed_proj_dim=WIDTH),
        of_text, 4 * LAYERS,
    ),
    "GPT-NeoX": (lambda: model_of("GPTNeoXForCausalLM", **TEXT), of_text, 2 * LAYERS),
    "Bloom": (
        lambda: model_of("BloomForCausalLM", vocab_size=WORDS, hidden_size=WIDTH, n_layer=LAYERS, n_head=2),
        of_text, 2 * LAYERS,
    ),
    "Phi": (lambda: model_of("PhiForCausalLM", **TEXT), of_text, 4 * LAYERS),
    "Falcon": (lambda: model_of("FalconForCausalLM", **TEXT), of_text, 2 * LAYERS),
    "BERT": (lambda: model_of("BertForMaskedLM", **TEXT), of_text, 4 * LAYERS + 2),
    "ViT": (lambda: model_of("ViTForImageClassification", **IMAGE), of_image, 4 * LAYERS),
    "DINOv2": (lambda: model_of("Dinov2Model", **IMAGE, mlp_ratio=2), of_image, 4 * LAYERS),
    "CLIP": (lambda: model_of("CLIPVisionModel", **IMAGE), of_image, 4 * LAYERS),
    "SigLIP": (lambda: model_of("SiglipVisionModel", **IMAGE), of_image, 4 * LAYERS + 1),
    "Swin": (
        lambda: model_of("SwinModel", image_size=8, patch_size=2, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=2),
        of_image, 3,
    ),
    "Whisper": (
        lambda: model_of(
            "WhisperModel", vocab_size=WORDS, num_mel_bins=8, d_model=WIDTH, encoder_layers=1, decoder_layers=1,
            encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32,
            max_source_positions=10, max_target_positions=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
            decoder_start_token_id=1,
        ),
        of_sound, 11,
    ),
    "Llama": (lambda: model_of("LlamaForCausalLM", **TEXT), of_text, 0),
}  # fmt: skip


def loss_and_gradients(model, output):
    model.zero_grad()
    result = output(model)
    (result * result.detach().cos()).sum().backward()
    return [result.detach(), *(p.grad for p in model.parameters())]


@pytest.mark.parametrize("name", MODELS)
def test_pairs_and_gradients(pairs, name):
    make, output, expected = MODELS[name]
    torch.manual_seed(0)
    model = make().double().eval()
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            fresh(module)
    plain, done = copy.deepcopy(model), patch(model)
    assert_same(loss_and_gradients(model, output), loss_and_gradients(plain, output))
    assert len(done.swapped) == expected, done.report
