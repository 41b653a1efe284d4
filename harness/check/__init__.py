"""Running kernels and judging what they wrote: cases, gates, rungs, diagnoses, the bug zoo.

From `workbook pNN --gate dW` to its verdict, ten files in order. A file without a folder is in this one:

 1  harness/cli.py. `run` finds the command, and run_puzzle calls checking.check.
 2  options.py. parse checks the flags and makes Options. `work` is the file that is meant: of the last rung
    with a gate of that name, for dW the kernels. `by_gate` sends one gate of the kernels to the virtual GPU,
    even where there is a real one.
 3  harness/screens/checking.py. GateCheck.run has the gate judged, notes that it passed, prints the verdict
    in the words of harness/screens/report.py, and returns the exit code: 0 right, 1 wrong, 3 unsolved; 4 where
    something does not compile.
 4  harness/puzzles/pNN/spec.py. Of each gate, the variant whose kernels are recorded and the quantities that
    it is judged on; cases, inputs, PyTorch's answer (`reference`), which sums are `atomic`.
    harness/spec/puzzle.py explains each field.
 5  problems/pNN/op/NAME.mojo, the `file` of the spec's MojoRung: blanks and kernels. The other files there
    are links to the solution's. `Call.launch` of the spec names the function that launches the kernels; those
    of puzzle 22 stand in op/launches.mojo: launch_backward_fused runs minimal_fused_backward_kernel, which
    holds dW, between a kernel that clears the sums and one that rounds them.
 6  checker.py. checker_of and make_checker make the checker, whose class the rung names by a string: for
    kernels "harness.check.checker:Checker". Where every blank asked about is untouched, Checker.check
    compiles nothing: "unsolved", exit code 3. Else it has the launches recorded; meanwhile what is right is
    read from the cache, or asked of PyTorch. The chapter's case is judged and printed first, then all of them,
    both passes of each. A gate that is right in float32 is judged again in bfloat16, in the cases with `in_16_bits`, where --dtype says
    nothing.
 7  judge.py. Judge.by_gate, then `on` and `variant`, have the recording replayed and put what is wrong down
    to the right gate. A gate is wrong by its values (`by_values`), by what the virtual GPU reports
    (`_share`), or with --repeat in a later run (`_repeat`). `_explain` then says why, from the mistakes that
    diagnose.py knows. The verdict is a GateResult (results.py).
 8  ran.py. Simulated.outcome gives what the launches wrote in each case, and findings. Where the forward pass
    saved something wrong, or nothing, it replays once more with right values in that place: so an untouched
    forward pass does not spoil dW.
 9  reference.py. Reference.compared hands each quantity to `compare` with the truth, which is PyTorch's
    answer in float64 (of float64 kernels, the derivation's in NumPy longdouble), and the baseline, which is
    its answer in the kernel's dtype. Both are kept in the cache, under a digest of the code that decides
    them: a gate of kernels imports torch only where they are missing.
10  compare.py. `compare` finds it right where max|got - truth| / max|truth| is at most 2 * s times the
    baseline's and a floor, 4 * 2^-23 in float32, 2^-8 in bfloat16; where NaN and infinity stand as in the
    truth; and where nothing is left unwritten. A spec may widen it for some quantities (`propagated`,
    `terms`), not for dW. For a sum of R rows by atomics s is sqrt(R) / 8, from 1 to 8; else it is 1.

Recording and replay: harness/devices/recorder.py compiles the program that record_program.py makes from the spec. It
calls the launch functions with a launcher that writes down (harness/devices/recording/recorder.mojo).
harness/devices/replay.py puts a case's tensors into the memory of the virtual GPU, and launches.

The other ways: a whole run, `pNN --backward`, or a gate with `--device gpu`, goes by runs.py to the same
Judge, once for each device; gates that are right then go through Checker.check in what the run has left out,
so that a gate has passed by its own cases and dtypes whatever command ran them. A file in Python is judged in a process of its own (apart.py): numpy_rung.py,
torch_rung.py, or the puzzle's. `--show` draws picture.py; blame.py finds its wrong thread.
"""
