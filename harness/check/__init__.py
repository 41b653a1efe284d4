"""Run kernels and check their results: cases, gates, rungs, diagnoses, known-bad solutions.

From `workbook p22 --gate dW` to its result; a file without a folder is in this one:

| step | file | function |
|---|---|---|
| find the command | harness/cli.py | `run`, `run_puzzle` |
| parse the flags, select the file with the gate | options.py | `parse` -> `Options` |
| check the gate, save passed gates as progress, return the exit code | harness/screens/checking.py | `GateCheck.run` |
| look up the gate's variant, quantities, cases, reference | harness/puzzles/p22/spec.py | `PUZZLE` |
| the learner's kernel | problems/p22/op/layernorm_linear.mojo | `minimal_fused_backward_kernel` |
| compile and record the launches | checker.py | `create_checker`, `Checker.check` |
| replay them on the virtual GPU, case by case | execution.py | `VirtualDevice.run_cases` |
| load or compute truth and baseline | reference.py | `Reference.compare_all` |
| compare a tensor with the limit | compare.py | `compare` -> `TensorResult` |
| turn comparisons and findings into the gate's result; calls the three above | grading.py | `Grader.grade_gates` |
| print the result | harness/screens/report.py | `format_gate` |

A gate is wrong if its values are wrong, the virtual GPU reports a finding, or a repeated run differs;
diagnose.py looks for the cause among the puzzle's known mistakes. A correct gate is checked again in
bfloat16. If the forward pass saves a wrong quantity, the backward kernels are replayed with the correct one.

| other paths | file |
|---|---|
| a whole run, `p22 --backward`, on every device | runs.py, with the same `Grader` |
| a Python file, in a subprocess | subprocess_checker.py, then numpy_rung.py, torch_rung.py or the puzzle's checker |
| `--show` | picture.py; blame.py finds the wrong thread |
| recording and replay | harness/devices/recorder.py, replay.py |
"""
