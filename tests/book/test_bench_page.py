"""What the benchmark's page says in words is what its measurements say."""

from book_paths import BOOK, ROOT

MEASURED = BOOK / "measurements" / "h200_bench_bfloat16.csv"
DRAWN = BOOK / "measurements" / "h200_drawn_sizes.csv"
TRAINED = BOOK / "measurements" / "h200_training.csv"


def test_the_gain_shrinks_as_the_product_grows():
    import bench_results

    found = bench_results.select(bench_results.read(MEASURED), "both", "graph")
    by_size = sorted(found.items(), key=lambda item: item[0][0] * item[0][1] * item[0][2])
    gains = [float(at["eager"]["median_us"]) / float(at["fast"]["median_us"]) for _, at in by_size]
    assert gains == sorted(gains, reverse=True)


def test_the_readme_shows_every_peer_as_the_book_does():
    """The README's table is the book's: all peers and passes, the losses too."""
    import bench_results

    def table(text, first):
        lines = text[text.index(first) :].split("\n\n")[0].splitlines()
        return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]

    made = table(bench_results.peers_table(bench_results.read(MEASURED), "graph"), "| rows: H→O")
    shown = table((ROOT / "README.md").read_text(encoding="utf-8"), "| rows: H→O")
    assert shown == made


def test_the_measurements_are_one_run_of_every_peer_in_every_pass():
    """Transformer Engine alone is left out, with a reason."""
    import bench_results

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


def test_what_the_readme_says_of_losses_and_memory():
    import bench_results

    rows = bench_results.read(MEASURED)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    faster = {}
    for direction in bench_results.PASSES:
        for dims, at in bench_results.select(rows, direction, "graph").items():
            ratios = {
                name: float(at["fast"]["median_us"]) / float(row["median_us"]) for name, row in at.items()
            }
            names = {name for name, ratio in ratios.items() if round(ratio, 2) > 1} - {"bare GEMMs"}
            if names:
                faster[direction, dims] = names
            if dims == (16384, 4096, 12288):
                assert all(abs(ratio - 1) < 0.03 for name, ratio in ratios.items() if name != "bare GEMMs")
    assert faster == {
        ("forward", (8192, 1024, 4096)): {"compile", "compile budget 0.5", "liger"},
        ("forward", (8192, 4096, 4096)): {"liger"},
        ("forward", (16384, 4096, 12288)): {"liger"},
    }
    assert "In the forward pass alone Liger is faster at three sizes of four" in readme
    ours = [at["fast"] for at in bench_results.select(rows, "both", "graph").values()]
    assert {row["fastest_peer"] for row in ours} == {"max-autotune"}
    first, second, third, last = (f"{float(row['ratio_to_fastest_peer']):.3f}" for row in ours)
    assert f"the layer takes {first}, {second}, {third} and {last} of the time" in readme
    higher = {name: 0 for name in bench_results.SHORT}
    for at in bench_results.select(rows, "both", "memory").values():
        kept = {name: int(row["saved_bytes"]) for name, row in at.items()}
        assert kept["fast"] == kept["compile budget 0.5"] < 0.51 * kept["eager"]
        for name, row in at.items():
            if name != "fast":
                higher[name] += int(at["fast"]["peak_bytes"]) > int(row["peak_bytes"])
    assert higher["compile"] == higher["compile budget 0.5"] == higher["max-autotune"] == 4
    assert higher["eager"] == higher["liger"] == 1


def test_what_the_readme_says_of_the_peak():
    """The newer record's, over torch.compile's, at the sizes of the README's table."""
    import bench_results

    peaks = bench_results.select(bench_results.read(DRAWN), "both", "memory")
    sizes = bench_results.select(bench_results.read(MEASURED), "both", "memory")
    bytes_at = [{name: int(row["peak_bytes"]) for name, row in peaks[dims].items()} for dims in sizes]
    first, second, third, last = (f"{at['fast'] / at['compile']:.2f}" for at in bytes_at)
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert (
        f"At the peak it needs {first}, {second}, {third} and {last} of what `torch.compile` needs" in readme
    )


def test_a_step_of_training_takes_less_memory():
    import bench_results

    models = bench_results.read_training(TRAINED)
    assert int(models["LayerNormLinear"][0]["peak_bytes"]) < int(models["plain PyTorch"][0]["peak_bytes"])


def test_the_layer_s_losses_go_no_further_than_rounding_carries_them():
    import bench_results

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
