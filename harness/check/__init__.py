"""Run kernels and check what they wrote: cases, gates, rungs, diagnoses, known-bad solutions.

From `workbook p22 --gate dW` to its result, in order; a file without a folder is in this one:

| step | file | function |
|---|---|---|
| find the command | harness/cli.py, harness/commands.py | `run`, `run_puzzle` |
| parse the flags; the file to check is that of the last rung with such a gate | options.py | `parse` -> `Options` |
| check the gate, record a pass, print, return the exit code | harness/screens/checking.py | `GateCheck.run` |
| what belongs to the gate: variant, quantities, cases, reference | harness/puzzles/p22/spec.py | `PUZZLE` |
| kernels and blanks; the other files there are links | problems/p22/op/layernorm_linear.mojo | `minimal_fused_backward_kernel` |
| compile and record the launches, load or compute the reference | checker.py | `create_checker`, `Checker.check` |
| turn outputs and findings into results of quantities and gates | grading.py | `Grader.by_gate`, `on`, `variant` |
| replay the recorded launches case by case | execution.py | `VirtualDevice.outcome` |
| truth in float64, baseline in the kernel's dtype | reference.py | `Reference.compare_all` |
| compare one tensor: max abs(got - truth) / max abs(truth) against the limit | compare.py | `compare` -> `TensorResult` |

A gate is wrong by its values, by a finding of the virtual GPU, or with --repeat in a later run. diagnose.py then says why, from the
puzzle's known mistakes. Untouched blanks compile nothing: exit code 3. A gate that is correct in float32 is checked again in
bfloat16, in the cases with `in_16_bits`, if there is no --dtype. Where the forward pass saved something wrong, its kernels are
replayed with the correct values in that place, so that it does not spoil dW.

The limit is 2 s baseline + floor, with a floor of 4 * 2^-23 in float32 and 2^-8 in bfloat16; for a sum of R rows by atomics s is
sqrt(R) / 8, from 1 to 8, else 1. A spec may widen it for some quantities (`propagated`, `terms`). The cache holds reference answers
under a digest of the code that decides them: torch is imported only if one is missing.

Recording and replay are harness/devices/recorder.py, record_program.py and replay.py. A whole run, `p22 --backward`, or a gate with
`--device gpu`, goes through runs.py to the same `Grader`, once for each device; gates that are correct then go through
`Checker.check` in the cases and dtypes that the run left out. A Python file is checked in a subprocess (subprocess_checker.py) by
numpy_rung.py, torch_rung.py, or the puzzle's own checker. `--show` draws picture.py; blame.py finds its wrong thread.
"""
