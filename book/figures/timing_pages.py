"""What the chapter on measuring shows: one product timed in several ways, and a CPU beside a GPU, from the records."""

from book.figures.charts import bars
from book.figures.ladder import duration, times
from book.figures.markdown_table import table
from book.measure.record import rows


def ways() -> dict[str, float]:
    """Way of timing -> its median in microseconds."""
    return {row["what"]: float(row["median_us"]) for row in rows("timing_ways")}


def ways_chart() -> str:
    """The same product by every way of timing."""
    shown = {
        "not synchronised": "product, not synchronised",
        "synchronised": "product, synchronised",
        "events, 1 call": "product, events around one call",
        "events, 100 calls": "product, events around 100 calls",
        "graph of 100": "product, a graph of 100",
        "L2 flushed": "product, L2 flushed before each",
    }
    times = {name: ways()[what] for name, what in shown.items()}
    words = "; ".join(f"{name} {duration(time)}" for name, time in times.items())
    rows = [(name, time, duration(time), False) for name, time in times.items()]
    return bars(f"What one product takes, by the way of timing it: {words}.", {"": rows})


def power_chart() -> str:
    """A large product rested, under load, and of zeros under load, with the driver's watts where the product ran meanwhile."""
    shown = {
        "random, rested": "large product, rested",
        "random, after 4 s": "large product, after 4 s of it",
        "zeros, after 4 s": "large product of zeros, after 4 s of it",
    }
    by_name, drawn = {row["what"]: row for row in rows("timing_ways")}, []
    for name, what in shown.items():
        row = by_name[what]
        time, watts = float(row["median_us"]), float(row["note"].split(" W")[0])
        words = duration(time) if name.endswith("rested") else f"{duration(time)}, {watts:.0f} W"
        drawn.append((name, time, words, False))
    spoken = "; ".join(f"{name} {words}" for name, _, words, _ in drawn)
    return bars(f"A large product on one GPU: {spoken}.", {"": drawn})


def both_devices() -> list[tuple[tuple[int, ...], str, float, float]]:
    """Sizes, pass, and the microseconds of PyTorch on the CPU and on the GPU."""
    gpu = {
        (int(row["M"]), int(row["H"]), int(row["O"]), row["pass"]): float(row["median_us"])
        for row in rows("fusion")
        if (row["candidate"], row["dtype"]) == ("eager", "float32")
    }
    pairs = []
    for row in rows("cpu_times"):
        B, S, H, O = (int(row[letter]) for letter in "BSHO")
        pairs.append(((B, S, H, O), row["pass"], float(row["median_us"]), gpu[B * S, H, O, row["pass"]]))
    return pairs


def devices_table() -> str:
    """The CPU beside the GPU, with how often one goes into the other."""
    body = []
    for dims, direction, cpu, gpu in both_devices():
        sizes = "{:,} × {:,}, {:,} → {:,}".format(*dims).replace(" ", "&nbsp;")
        body.append([sizes, direction, duration(cpu), duration(gpu), times(cpu / gpu)])
    cpu, gpu = rows("cpu_times")[0], rows("fusion")[0]
    told = table(["B × S, H → O", "pass", "CPU", "GPU", "CPU over GPU"], body, "llrrr")
    return (
        f"{told}\nFloat32, PyTorch's own two operations. CPU: {cpu['machine']}, {cpu['date']}, PyTorch {cpu['torch']}, processor time, "
        f"median of {cpu['rounds']} rounds (`python -m book.measure cpu_times`). GPU: {gpu['device']}, {gpu['date']}, PyTorch "
        f"{gpu['torch']}, single calls by the host's clock, each waited for.\n"
    )


def profiler_table() -> str:
    """The kernels of LayerNorm, then Linear, forward and backward, as PyTorch's profiler names and times them."""
    body = [[f"`{row['kernel']}`", row["calls"], row["us"]] for row in rows("profiler")]
    return table(["kernel", "calls", "µs"], body, "lrr")


def pages() -> dict[str, str]:
    """What the chapter includes, by file name."""
    return {
        "timing_ways.svg": ways_chart(),
        "timing_power.svg": power_chart(),
        "cpu_gpu.md": devices_table(),
        "profiler.md": profiler_table(),
    }
