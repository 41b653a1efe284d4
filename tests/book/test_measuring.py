"""The table of the ladder says what was measured; words of the glossary are linked where they should be."""

import re

from book_paths import BOOK

# ---- The ladder as a table ----------------------------------------------------------------------------------


def cells(table: str, row: str) -> list[str]:
    (cells_of_row,) = re.findall(rf"<tr><th>{row}</th>(.*?)</tr>", table)
    return re.findall(r"<td>(.*?)</td>", cells_of_row)


def test_the_table_of_the_ladder_has_times_shares_and_counters():
    from book.figures import ladder, ladder_table
    from book.measure import record

    rungs = ladder.found()
    pages = ladder_table.pages(rungs)
    forward, backward = pages["ladder_table_forward.html"], pages["ladder_table_backward.html"]
    total = rungs.took("fast", "forward")
    assert cells(forward, "took")[-1] == ladder.duration(total)
    assert cells(forward, "of the bare product")[-1] == f"{rungs.bare['forward'] / total:.0%}"
    assert [words.split(":")[0] for words in cells(forward, "which is")] == [
        "a run",
        "a run",
        "a sum",
        "a sum",
        "a run",
    ]
    # From the recorded profiles: the first fused kernel alone, the five unfused ones, the fast row kernel and product.
    moved = cells(forward, "bytes moved, times the shapes'")
    assert (
        moved[0] == "15.6"
        and moved[1] == f"{(1152 + 3072 + 1024 + 2048 + 3072) / (640 + 1216 + 1024 + 2048 + 2112):.1f}"
    )
    assert moved[4] == f"{(2176 + 3072) / (1216 + 2112):.1f}"
    B, S, H, O = rungs.dims
    sizes = str(B * S), str(H), str(O)
    times = {
        row["pass"]: ladder.duration(float(row["median_us"]))
        for row in record.rows("bench")
        if (row["M"], row["H"], row["O"], row["candidate"], row["column"]) == (*sizes, "fast", "graph")
    }
    assert cells(backward, "took")[-1] == times["backward"]
    assert "benchmark" in cells(backward, "which is")[-1]
    assert times["forward"] in pages["ladder_beside.md"], "the benchmark has this size"


def test_the_watts_of_a_rested_gpu_are_not_those_of_its_product():
    from book.figures import timing_pages

    said = re.findall(r">([^<]+)</text>", timing_pages.power_chart())[1::2]
    assert [" W" in words for words in said] == [False, True, True]


# ---- The glossary -------------------------------------------------------------------------------------------


def test_a_word_is_linked_where_it_is_first_used_and_nowhere_else():
    from book.build import glossary

    main = (
        "<h2>Warps</h2><p>Two <code>warp</code>s, a <a href='#x'>warp</a>, <em>warps</em>, a warp.</p>"
        "<figure><p>L2</p></figure><p>the L2 cache, prewarped, a transformer block, added to the\nstream, a residual stream</p>"
    )
    linked = glossary.with_links(main, "../glossary.html")
    assert linked.count('class="term"') == 2
    assert '<em><a class="term" href="../glossary.html#warp">warps</a></em>, a warp.' in linked
    assert 'the <a class="term" href="../glossary.html#l2">L2</a> cache' in linked
    assert re.sub(r'<a class="term"[^>]*>(.*?)</a>', r"\1", linked) == main


def test_every_word_has_its_entry_and_every_entry_its_word():
    from book.build import glossary

    text = (BOOK / "src" / "glossary.md").read_text()
    entries = {name.lower().replace(" ", "-") for name in re.findall(r"^### (.+)$", text, re.M)}
    assert entries - set(glossary.TERMS) <= {"grid", "tile", "synchronise"}, "said in too many other senses"
    assert set(glossary.TERMS) <= entries


def test_pages_link_their_words(site):
    page = (site / "puzzle_19" / "puzzle_19.html").read_text()
    assert page.count('href="../glossary.html#warp"') == 1
    assert 'class="term"' not in (site / "glossary.html").read_text()
