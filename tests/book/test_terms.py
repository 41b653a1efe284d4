"""A term is explained where the path first uses it: the paragraph of its first use has it in italics, as STYLE.md says."""

import re

import pytest
from book_paths import BOOK
from typed import present

from book.build import reading

SRC = BOOK / "src"
TERMS = {
    "kernel": r"kernels?",
    "launch": r"launch(?:es)?",
    "block": r"blocks of threads|a block|many blocks|one block",
    "barrier": r"barriers?",
    "race": r"races?",
    "PTX": r"PTX",
    "transformer": r"transformers?",
    "LayerNorm": r"LayerNorm",
    "attention": r"attention",
    "Jacobian": r"Jacobians?",
    "finite difference": r"finite differences?",
    "host": r"hosts?",
    "virtual GPU": r"virtual GPU",
    "harness": r"harness",
    "op": r"ops?",
    "fuse": r"fuses?|fused",
    "fake": r"fake",
    "schema": r"schema",
    "stride": r"strides?",
    "expanded": r"expanded",
    "contiguous": r"contiguous",
    "warp": r"warps?",
    "lane": r"lanes?",
    "grid": r"grid",
    "guard": r"guards?",
    "shared memory": r"shared memory",
    "multiprocessor": r"multiprocessors?",
    "register": r"registers",
    "sector": r"sectors?",
    "coalesced": r"coalesced",
    "atomic": r"atomics?|atomic additions?|atomically",
    "gate": r"gates?",
    "blank": r"blanks?",
    "rung": r"rungs?",
    "logit": r"logits?",
    "GELU": r"GELU",
    "residual": r"residual",
    "autocast": r"autocast",
    "mixed precision": r"mixed precision",
    "ledger": r"ledgers?",
    "museum": r"museum",
    "stream": r"streams",
    "checkpointing": r"checkpointing|recomputes a block",
    "tile": r"tiles?|tiled",
    "tensor core": r"tensor cores?",
    "cache": r"L2",
    "roofline": r"roofline",
    "warpgroup": r"warpgroups?",
    "tensor memory accelerator": r"tensor memory accelerator|TMA",
    "wgmma": r"wgmma",
    "epilogue": r"epilogues?",
    "Hopper": r"Hopper",
    "CUDA graph": r"CUDA graphs?",
    "head": r"heads?",
    "query": r"quer(?:y|ies)",
    "causal": r"causal",
    "log-sum-exp": r"log-sum-exp",
    "lse": r"lse",
    "delta": r"delta",
    "grouped queries": r"grouped queries|enable_gqa",
    "cuDNN": r"cuDNN",
    "dropout": r"dropout",
    "FlexAttention": r"FlexAttention",
    "NATTEN": r"NATTEN",
    "rank": r"ranks?",
    "gloo": r"gloo",
    "NCCL": r"NCCL",
    "NVLink": r"NVLink",
    "zig-zag": r"zig-zag",
    "Dynamo": r"Dynamo",
    "AOTAutograd": r"AOTAutograd",
    "ATen": r"ATen",
    "Inductor": r"Inductor",
    "tail": r"tails?",
    "placeholder": r"placeholders?",
    "pointwise": r"pointwise",
    "lint": r"lint",
    "lowering": r"lowering",
    "embedding": r"embeddings?",
    "label smoothing": r"label smoothing",
    "AdamW": r"AdamW",
    "clipping": r"clipping",
    "tied": r"tied",
    "padding": r"padding",
    "row-major": r"row-major",
    "activation": r"activations?",
    "Adam": r"Adam",
    "MLP": r"MLP",
    "compensated": r"compensated",
    "scratch memory": r"scratch",
    "token": r"tokens?",
    "vocabulary": r"vocabulary",
    "gather": r"gather(?:s|ed)?",
    "scatter": r"scatter(?:s|ed)?",
    "frame": r"frames?",
    "graph break": r"graph breaks?",
    "Philox": r"Philox",
    "subnormal": r"subnormal",
    "mask of tiles": r"mask of tiles",
    "cooperative": r"cooperative",
    "global memory": r"global memory",
    "shuffle": r"shuffles?",
}
"""A word of the trade -> what is a use of it."""


def path() -> list[str]:
    """The pages of the path in reading order, from the introduction to the last of the capstone."""
    pages = list(reading.pages(SRC))
    return pages[: pages.index("puzzle_27/where_to_go.md") + 1]


def paragraphs(text: str) -> list[str]:
    """The running text of a page, captions and tables too, without code, formulas, headings and addresses."""
    text = re.sub(r"^```.*?^```|<!--.*?-->|\$\$.*?\$\$|\{\{.*?\}\}|^#.*?$", "", text, flags=re.S | re.M)
    text = re.sub(
        r"\]\([^)]*\)|`[^`]*`|\$[^$\n]*\$|<(?!/?em)[^>]*>",
        "",
        re.sub(r"</?em>", "*", text.replace("`wgmma`", "wgmma")),
    )
    return [
        words
        for part in re.split(r"\n\s*\n|\n(?= *(?:[-|]|\d+\.) )", text)
        if (words := " ".join(part.split()))
    ]


def first_use(uses: str, pages: list[tuple[str, str]]) -> tuple[str, str]:
    """The page and the paragraph that first use a word."""
    word = re.compile(rf"(?<![\w-])(?:{uses})(?![\w-])", re.I)
    return present(
        next(((page, part) for page, text in pages for part in paragraphs(text) if word.search(part)), None)
    )


def explained(term: str, uses: str, part: str) -> bool:
    """Whether a paragraph has the word in italics."""
    marked = re.findall(r"\*{1,2}([^*]+)\*{1,2}", part.replace("****", ""))
    return any(term.lower() in words.lower() or re.search(uses, words, re.I) for words in marked)


PAGES = [(page, (SRC / page).read_text()) for page in path()]


@pytest.mark.parametrize("term", TERMS)
def test_a_term_is_explained_where_it_is_first_used(term):
    page, part = first_use(TERMS[term], PAGES)
    assert explained(term, TERMS[term], part), (
        f"{page} uses '{term}' before any page explains it in italics: {part}"
    )


def test_a_use_before_the_explanation_is_found_and_one_in_code_or_a_heading_is_not():
    early = "# A guard\n\n`guard`, $guard$, [x](guard.md)\n\n```text\nguard\n```\n\n- no\n- a guard\n\nThis *guard* is an `if`."
    page, part = first_use("guards?", [("early.md", "# No\n\nnone\n"), ("late.md", early)])
    assert (page, part) == ("late.md", "- a guard") and not explained("guard", "guards?", part)
    right = early.replace("- a guard", "- an <em>if</em>")
    assert explained("guard", "guards?", first_use("guards?", [("late.md", right)])[1])


def test_every_word_of_the_list_is_used():
    assert [term for term, uses in TERMS.items() if not any(re.search(uses, text) for _, text in PAGES)] == []
