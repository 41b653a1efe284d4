"""What the benchmark's page says in words is what its measurements say."""

import pytest
from book_paths import BOOK

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

    import generate

    earlier = MEASURED.with_name("h200_bench_full_run.csv")
    with earlier.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if (row["pass"], row["column"]) == ("both", "graph")]
    times = {
        (row["M"], row["H"], row["candidate"]): float(row["median_us"]) for row in rows if row["median_us"]
    }
    lines = generate.autotune_table().splitlines()[2:]
    shown = [float(line.split("|")[3]) for line in lines]
    expected = [
        times[M, H, "max-autotune"] / times[M, H, "bare GEMMs"]
        for M, H, name in times
        if name == "max-autotune"
    ]
    assert shown == pytest.approx(expected, abs=0.01) and len(shown) == 4


@pytest.mark.skipif(not TRAINED.is_file(), reason="no training run on a GPU is in book/measurements")
def test_a_step_is_no_faster_and_takes_less_memory():
    import bench_results

    models = bench_results.read_training(TRAINED)
    lines = {
        cells[1].strip(): cells
        for cells in (line.split("|") for line in bench_results.training_table(models).splitlines()[2:])
    }
    assert float(lines["LayerNormLinear"][5]) >= 1
    assert int(models["LayerNormLinear"][0]["peak_bytes"]) < int(models["plain PyTorch"][0]["peak_bytes"])
