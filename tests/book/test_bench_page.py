"""What the benchmark's page says in words is what its measurements say."""

import pytest
from book_paths import BOOK, ROOT

MEASURED = BOOK / "measurements" / "h200_bench_bfloat16.csv"
TRAINED = BOOK / "measurements" / "h200_training.csv"


@pytest.mark.skipif(not MEASURED.is_file(), reason="no benchmark of a GPU is in book/measurements")
def test_the_gain_shrinks_as_the_product_grows():
    import bench_results

    found = bench_results.select(bench_results.read(MEASURED), "both", "graph")
    by_size = sorted(found.items(), key=lambda item: item[0][0] * item[0][1] * item[0][2])
    gains = [float(at["eager"]["median_us"]) / float(at["fast"]["median_us"]) for _, at in by_size]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.skipif(not MEASURED.is_file(), reason="no benchmark of a GPU is in book/measurements")
def test_max_autotune_is_compared_over_the_products_of_its_own_run():
    import csv

    import bench_results

    def times(file):
        with file.open(newline="") as lines:
            rows = [row for row in csv.DictReader(lines) if (row["pass"], row["column"]) == ("both", "graph")]
        return {
            (row["M"], row["H"], row["candidate"]): float(row["median_us"])
            for row in rows
            if row["median_us"]
        }

    last, earlier = times(MEASURED), times(MEASURED.with_name("h200_bench_full_run.csv"))
    head, *body = (
        line.split("|")[1:-1]
        for line in bench_results.peers_table(bench_results.read(MEASURED), "graph").splitlines()
    )
    at = next(i for i, name in enumerate(head) if "autotune" in name)
    shown = [float(line[at].strip(" *")) for line in body if line[1].strip() == "both"]
    expected = [
        (last[M, H, "fast"] / last[M, H, "bare GEMMs"])
        / (earlier[M, H, "max-autotune"] / earlier[M, H, "bare GEMMs"])
        for M, H, name in earlier
        if name == "max-autotune"
    ]
    assert shown == pytest.approx(expected, abs=0.01) and len(shown) == 4


@pytest.mark.skipif(not MEASURED.is_file(), reason="no benchmark of a GPU is in book/measurements")
def test_the_readme_shows_every_peer_as_the_book_does():
    """The README's table is the book's: all peers, forward and together, the losses too."""
    import bench_results

    def table(text, first):
        lines = text[text.index(first) :].split("\n\n")[0].splitlines()
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]

    made = table(bench_results.peers_table(bench_results.read(MEASURED), "graph"), "| rows: H→O")
    shown = table((ROOT / "README.md").read_text(encoding="utf-8"), "| rows: H→O")
    assert shown == [line for line in made if "†" not in line[1]]


@pytest.mark.skipif(not TRAINED.is_file(), reason="no training run on a GPU is in book/measurements")
def test_a_step_of_training_takes_less_memory():
    import bench_results

    models = bench_results.read_training(TRAINED)
    assert int(models["LayerNormLinear"][0]["peak_bytes"]) < int(models["plain PyTorch"][0]["peak_bytes"])
