"""Running kernels and judging what they wrote: cases, gates, rungs, diagnoses, the bug zoo.

From `pNN --gate dW` to its verdict, in order. A file without a folder is in this one:

    harness/__main__.py          main: asks the warm process first (warm.py), then calls cli.main
    harness/cli.py               run: options.parse checks the flags and makes Options. run_puzzle calls checking.check
    options.py                   the flags, the sizes that fit, and Options, what is asked for
    harness/screens/checking.py  GateCheck.run: has the gate judged, notes that it passed, prints the verdict (its words are
                                 harness/screens/report.py's). If a warm process answered (harness/server.py), it has judged in
                                 the same way. If not, this process judges, and starts one for the next command
    checker.py                   checker_of makes the rung's checker. The one for kernels is here: Checker.check records their
                                 launches (harness/devices/recorder.py) while PyTorch computes what is right. A gate that is right
                                 in float32 is judged again in bfloat16
    judge.py                     Judge.by_gate, then `variant`: has the recording replayed, and puts what is wrong down to the
                                 right gate. A gate is wrong by its values (`by_values`), by what the virtual GPU reports
                                 (`_share`), or with --repeat in a later run (`_repeat`); it is then explained: diagnose.py
                                 knows the mistakes, and a gate before it may be to blame. GateResult (results.py) holds it all
    ran.py                       Simulated.outcome: the cases on the virtual GPU (harness/devices/replay.py), what they wrote and
                                 findings
    reference.py                 Reference.compared: each quantity beside PyTorch's in float64
    compare.py                   compare: whether it is within its limit

The puzzle's spec (harness/puzzles/pNN/spec.py) holds the gates, and for each the variant whose kernels are recorded. The file
is that of the last rung with a gate of that name (`Puzzle.rung_of`): for dW, the kernels. A single gate of the kernels goes to
the virtual GPU even where there is a real one.

The other ways: a whole run, `pNN --backward`, or a gate with `--device gpu`, goes by runs.py to the same Judge, once for each
device (`Options.by_gate` in options.py says which it is). A file in Python is judged in a process of its own (apart.py):
numpy_rung.py, torch_rung.py, or the puzzle's. `--show` draws picture.py; blame.py finds its wrong thread.
"""
