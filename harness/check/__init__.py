"""Running kernels and judging what they wrote: cases, gates, rungs, diagnoses, the bug zoo.

From `pNN --gate dW` to its verdict:

    harness/flags.py             the arguments become Options (options.py), and are checked, the gate too
    harness/screens/checking.py  check_gates asks a checker for verdicts and prints them (screens/report.py)
    warm.py                      a gate of kernels is judged by the warm process of harness/server.py, if there is one; else
    checkers.py                  which checker: the one that the file's rung names
    gates.py                     Checker, of kernels: they are recorded (devices/recorder.py) while PyTorch says what is right
                                 (reference.py); NumPy and PyTorch files have numpy_rung.py and torch_rung.py
    judge.py                     Judge: has the recording replayed on the virtual GPU (ran.py, devices/replay.py), compares
                                 (compare.py), and says what went wrong (diagnose.py, blame.py)
    results.py                   GateResult: what a verdict holds

A whole run, `pNN --backward`, goes by runs.py to the same Judge, once for each device.
"""
