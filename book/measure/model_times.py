"""Measures a training step of GPT-2, 124M, with and without the workbook's backend: `python -m book.measure gpt2_step`.

Forward and backward, random weights, no dropout, in two settings: all in bfloat16, and as one trains, with float32 parameters
under autocast. Each way is recorded as one CUDA graph, replayed in shuffled rounds after a pause. It wants a GPU and `transformers` (the extra `models`). The page of puzzle 26 shows the rows.
"""

import importlib
import importlib.metadata
import os
import time
from collections.abc import Callable, Iterator

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.nn.functional as F

from book.measure.shared import medians, write
from harness.nn import mojo_workbook

CONTEXT, ROUNDS, BURST = 1024, 12, 200_000
"""Tokens; rounds, and the microseconds of a turn."""
VOCABULARY = 50257
SETTINGS = {"bfloat16": (8, torch.bfloat16), "autocast": (16, torch.float32)}
"""Name -> batch, and the dtype of the parameters; those in float32 are taken in bfloat16 under autocast."""


def causal(module, query, key, value, mask, scaling=None, **options) -> tuple[torch.Tensor, None]:
    """Attention as training code calls it; `transformers` itself hands it a mask when it is compiled."""
    output = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return output.transpose(1, 2), None


def make_model(dtype: torch.dtype) -> torch.nn.Module:
    """GPT-2 small with a language model's head. Raises ImportError without the extra."""
    # By its name, so that types come out alike with and without the extra.
    transformers = importlib.import_module("transformers")
    transformers.AttentionInterface.register("causal", causal)
    transformers.AttentionMaskInterface.register("causal", lambda *arguments, **options: None)
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="causal"
    )
    model = transformers.GPT2LMHeadModel(config).to("cuda", dtype).train()
    model.loss_type = "ForCausalLM"
    return model


def recorded(model, forward: Callable, ids: torch.Tensor) -> tuple[Callable[[], None], dict]:
    """One training step as a CUDA graph, and what is known of it: seconds of the first steps, loss, peak memory."""

    def step() -> torch.Tensor:
        wide = next(model.parameters()).dtype == torch.float32
        # Without its cache: a graph would hold copies that it does not make again.
        with torch.autocast("cuda", torch.bfloat16, enabled=wide, cache_enabled=False):
            loss = forward(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss

    start, stream = time.perf_counter(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            model.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, graph = torch.cuda.memory_allocated(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    graph.replay()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) >> 20
    model.zero_grad(set_to_none=True)
    return graph.replay, {"first_s": f"{first:.1f}", "loss": f"{loss.item():.4f}", "peak_mib": peak}


def rows(setting: str) -> Iterator[dict]:
    """A row for each way in a setting."""
    batch, dtype = SETTINGS[setting]
    torch._dynamo.reset()
    model = make_model(dtype)
    ids = torch.randint(0, VOCABULARY, (batch, CONTEXT), device="cuda")
    ways = {
        "eager": model,
        "torch.compile": torch.compile(model),
        "mojo_workbook": torch.compile(model, backend=mojo_workbook),
        "mojo_workbook, LayerNorms alone": torch.compile(
            model, backend=mojo_workbook, options={"attention": False}
        ),
    }
    steps = {way: recorded(model, forward, ids) for way, forward in ways.items()}
    times = medians({way: graph for way, (graph, _) in steps.items()}, ROUNDS, BURST, pause=0.06)
    for way, (_, known) in steps.items():
        row = {"setting": setting, "batch": batch, "way": way, "median_ms": f"{times[way] / 1e3:.3f}"}
        yield row | known | {"transformers": importlib.metadata.version("transformers")}


if __name__ == "__main__":
    write(row for setting in SETTINGS for row in rows(setting))
