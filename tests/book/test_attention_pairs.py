"""The tables of float32 attention by pairs say what their record says."""

from book.figures import attention_pairs

NAMES = ("device", "torch", "date", "command", "S", "causal", "inputs", "way", "result", "error")
NAMES += ("of_efficient", "of_math", "graph_us", "peak_bytes", "note")
MACHINE = {"device": "NVIDIA H200", "torch": "2.11.0", "date": "2026-01-02"}


def test_times_errors_and_places(monkeypatch):
    times = (("pairs", 250, 6), ("pairs, portable", 400, 6), ("efficient", 1000, 4))
    rows = [
        {"S": 2048, "causal": 0, "inputs": "ordinary", "way": way, "graph_us": time, "peak_bytes": peak}
        for way, time, peak in times
    ]
    for way, note in (("pairs", ""), ("pairs, portable", "the plain path")):
        for error in ("3e-7", "1e-7"):
            rows.append({"inputs": "an outlier in key", "way": way, "error": error, "note": note})
            rows[-1]["of_efficient"] = "2e-7"
    rows += [{"inputs": "nan in key", "way": "pairs", "note": note} for note in ("as PyTorch", "elsewhere")]
    rows += [{"way": "pairs", "note": "the same bits in 20 of 20 runs"}]
    texts = [
        dict.fromkeys(NAMES, "") | MACHINE | {name: str(value) for name, value in row.items()} for row in rows
    ]
    monkeypatch.setattr(attention_pairs.record, "rows", lambda name: texts)
    text = attention_pairs.pages()["attention_pairs.md"]
    assert "NVIDIA H200, torch 2.11.0, 2026-01-02" in text
    assert "| 2,048 |  | 250.0 µs | 400.0 µs | 1,000 µs | 0.25 | 0.40 | 1.50 |" in text
    assert "| an outlier in key | 3.0e-07 | 1.50 | 1.50 | plain |" in text
    assert "1 of 2 calls have infinities and NaNs in the same places" in text
    assert "`wgmma`: the same bits in 20 of 20 runs." in text
