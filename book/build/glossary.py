"""Links the words of the glossary where a page first uses them: in its running text, never in code, headings, links or figures.

It works on the built pages, behind mdBook: what a link is made of then stands there, whatever wrote it.
"""

import os
import re
from pathlib import Path

PAGE = "glossary.html"
TERMS = {
    "lane": r"lanes?",
    "warp": r"warps?",
    "warpgroup": r"warpgroups?",
    "block": r"thread blocks?|blocks? of (?:\d+ )?threads|grid of blocks",
    "launch": r"(?:two|three|four|five|eight|single|more|such) launches",
    "multiprocessor": r"multiprocessors?",
    "occupancy": r"occupancy",
    "barrier": r"barriers?",
    "race": r"races?",
    "shuffle": r"shuffles?",
    "register": r"registers",
    "shared-memory": r"shared memory",
    "bank": r"bank conflicts?",
    "sector": r"sectors?",
    "coalesced": r"coalesced",
    "l2": r"L2",
    "fence": r"fences?",
    "atomic": r"atomics|atomic additions?",
    "roofline": r"roofline",
    "ledger": r"ledgers?",
    "tensor-core": r"tensor cores?",
    "sm_90a": r"sm_90a",
    "tensor-memory-accelerator": r"tensor memory accelerator|TMA",
    "epilogue": r"epilogues?",
    "prologue": r"prologues?",
    "stream": r"(?<!the\s)(?<!every\s)(?<!residual\s)streams?",  # that of a model, which residuals add to, is another thing
    "cuda-event": r"CUDA events?",
    "cuda-graph": r"CUDA graphs?",
    "ptx": r"PTX",
    "virtual-gpu": r"virtual GPU",
    "museum": r"museum",
    "logit": r"logits?",
    "log-sum-exp": r"log-sum-exp|lse",
    "grouped-queries": r"grouped queries",
    "autocast": r"autocast",
    "checkpointing": r"checkpointing",
    "dynamo": r"Dynamo",
    "aotautograd": r"AOTAutograd",
    "inductor": r"Inductor",
    "nccl": r"NCCL",
}
"""Heading of the glossary, as its anchor -> what is a use of the word."""
USES = {term: re.compile(rf"(?<![\w-])({uses})(?![\w-])(?![^<]*</a>)") for term, uses in TERMS.items()}
ANY = re.compile("|".join(TERMS.values()))
"""What most texts hold none of: one search says so."""
LEFT_ALONE = (
    "a", "code", "pre", "h1", "h2", "h3", "h4", "svg", "figure", "summary", "button", "script", "style",
    "math", "th",
)  # fmt: skip
"""Elements in which nothing is linked."""
TAG = re.compile(r"<!--.*?-->|<(/?)([a-zA-Z][\w-]*)[^>]*?(/?)>", re.S)
MAIN = re.compile(r"(<main>)(.*?)(</main>)", re.S)


def link(site: Path) -> None:
    """Puts the links on every page of a built book that has a glossary, but for the glossary and the page for printing."""
    if not (site / PAGE).is_file():
        return
    for page in site.rglob("*.html"):
        if page.name in (PAGE, "print.html", "toc.html", "404.html"):
            continue
        text = page.read_text(encoding="utf-8")
        to = os.path.relpath(site / PAGE, page.parent).replace(os.sep, "/")
        linked = MAIN.sub(lambda found, to=to: found[1] + with_links(found[2], to) + found[3], text, count=1)
        if linked != text:
            page.write_text(linked, encoding="utf-8")


def with_links(main: str, to: str) -> str:
    """The content of a page with the first use of each word linked; `to` is the glossary's address from there."""
    missing = dict(USES)
    out: list[str] = []
    closed_to, place = [], 0
    for tag in TAG.finditer(main):
        words = main[place : tag.start()]
        out += [words if closed_to else linked_words(words, missing, to), tag[0]]
        place = tag.end()
        name = (tag[2] or "").lower()
        if name in LEFT_ALONE and not tag[3]:
            if tag[1] and name in closed_to:
                closed_to.remove(name)
            elif not tag[1]:
                closed_to.append(name)
    return "".join(out) + main[place:]


def linked_words(words: str, missing: dict[str, re.Pattern[str]], to: str) -> str:
    """Text with the words that are still missing linked; those that are found are taken out of `missing`."""
    for term, pattern in list(missing.items()) if ANY.search(words) else ():
        # What an earlier word made is no text any more.
        linked = pattern.sub(rf'<a class="term" href="{to}#{term}">\1</a>', words, count=1)
        if linked != words:
            words = linked
            del missing[term]
    return words
