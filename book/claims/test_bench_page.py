"""What the benchmark's page says in words is what its measurements say."""

from book_paths import BOOK, ROOT

MEASURED = BOOK / "measurements" / "h200_bench_bfloat16.csv"
LAYERS = BOOK / "src" / "layers.md"
TRAINED = BOOK / "measurements" / "h200_training.csv"


def test_the_gain_shrinks_as_the_product_grows():
    from book.figures import bench_results

    found = bench_results.select(bench_results.read(MEASURED), "both", "graph")
    by_size = sorted(found.items(), key=lambda item: item[0][0] * item[0][1] * item[0][2])
    gains = [float(at["eager"]["median_us"]) / float(at["fast"]["median_us"]) for _, at in by_size]
    assert gains == sorted(gains, reverse=True)


def test_the_readme_s_table_is_made_from_the_records():
    """Six rows, and what the page of the layers shows."""
    from book.figures import speed_table

    made = speed_table.speed_table()
    assert speed_table.MARKED.findall((ROOT / "README.md").read_text(encoding="utf-8")) == [made]
    assert (
        len(made.splitlines()) == 2 + 6 and "{{#include ../.cache/generated/speed.md}}" in LAYERS.read_text()
    )


def test_the_measurements_are_one_run_of_every_peer_in_every_pass():
    """Transformer Engine alone is left out, with a reason."""
    from book.figures import bench_results

    rows = bench_results.read(MEASURED)
    assert {(row["device"], row["torch"], row["date"]) for row in rows} == {
        ("NVIDIA H200", "2.11.0+cu130", "2026-11-22")
    }
    everybody = set(bench_results.SHORT) - {"transformer-engine"} | {"fast"}
    for column in ("graph", "loop"):
        for direction in bench_results.PASSES:
            found = bench_results.select(rows, direction, column)
            assert len(found) == 4 and all(set(at) == everybody for at in found.values())
    assert bench_results.absent(rows) == ""
    assert bench_results.left_out(rows).startswith("- Transformer Engine (")


def test_a_step_of_training_takes_less_memory():
    from book.figures import bench_results

    models = bench_results.read_training(TRAINED)
    assert int(models["LayerNormLinear"][0]["peak_bytes"]) < int(models["plain PyTorch"][0]["peak_bytes"])


def test_the_layer_s_losses_go_no_further_than_rounding_carries_them():
    from book.figures import bench_results

    losses = {
        name: [float(row["loss"]) for row in rows]
        for name, rows in bench_results.read_training(TRAINED).items()
    }
    plain = losses["plain PyTorch"]
    layer, control = (
        sum(abs(a - b) for a, b in zip(losses[name], plain, strict=True)) / len(plain)
        for name in ("LayerNormLinear", "plain PyTorch, moved")
    )
    assert 0 < layer <= control
