"""Running kernels and judging what they wrote: cases, gates, rungs, diagnoses, the bug zoo.

From `pNN --gate dW` to its verdict, in order:

    harness/cli.py               run: the arguments become Options, checked in harness/flags.py; then checking.check
    harness/screens/checking.py  check_gates: has the gate judged, prints the verdict (screens/report.py), notes that it passed.
                                 Where a warm process answers (warm.py, asked by __main__.py already), it has judged in the same way
    gates.py                     checker_of makes the rung's checker. That of kernels is here: Checker.check records them
                                 (devices/recorder.py) while PyTorch says what is right, in float32, and a right one again in bfloat16
    judge.py                     Judge.by_gate: has the recording replayed, and puts what is wrong down to the right gate. A gate is
                                 wrong by its values (`by_values`), by what the virtual GPU reports (`_share`), or in a second run
    ran.py                       Simulated.outcome: the cases on the virtual GPU (devices/replay.py), what they wrote and findings
    reference.py                 Reference.compared: each quantity beside PyTorch's in float64; `compare.compare` decides by its limit
    diagnose.py                  what is said of a wrong one: which known mistake it is, or which gate before it is to blame
    results.py                   GateResult: what a verdict holds, and the exit code of some

Which rung has a gate of that name is for `Puzzle.rung_of` (spec/puzzle.py) to say.

The other ways: a whole run, `pNN --backward`, goes by runs.py to the same Judge, once for each device (`Options.by_gate` in
options.py says which it is). A file in Python is judged in a process of its own (apart.py):
numpy_rung.py, torch_rung.py, or the puzzle's. `--show` draws picture.py; blame.py finds its wrong thread.
"""
