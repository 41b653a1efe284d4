"""Checker of puzzle 26's rungs: runs each gate's checks, which raise `CheckError`."""

import contextlib
import io
import logging
from pathlib import Path

import torch

from harness.check.diagnose import format_pointer
from harness.check.python_files import PythonChecker, load_module, locate_error
from harness.check.results import GateResult
from harness.learner import blanks
from harness.puzzles.p26 import composing, folding, matching, models, printing, swapping
from harness.puzzles.p26.compile_cases import (
    Check,
    CheckError,
    Module,
    find_original_exception,
    make_table_check,
)
from harness.puzzles.p26.mistakes import FIXES
from harness.spec.puzzle import Case, Gate
from harness.toolchain import roots

logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns where CUDA is missing

CHECKS: dict[str, tuple[Check, ...]] = {
    "rows": (printing.check_table,),
    "groups": (printing.check_groups,),
    "show": (printing.check_unchanged, printing.check_lines),
    "history": (printing.check_history,),
    "factor": (folding.check_factors,),
    "exact": (folding.check_exact_folds,),
    "chain": (make_table_check("fold", folding.CHAIN_CASES),),
    "neutral": (make_table_check("drop_ones", folding.NEUTRAL_CASES),),
    "sweep": (make_table_check("sweep", folding.SWEEP_CASES), folding.check_unused_input),
    "replace": (matching.check_replacement,),
    "silu": (make_table_check("silu", matching.SILU_CASES),),
    "values": (matching.check_values,),
    "gelu": (matching.check_tanh_form, make_table_check("gelu", matching.GELU_CASES)),
    "rewrite": (composing.check_rewriting,),
    "backend": (composing.check_handoff, composing.check_inductor),
    "aot": (composing.check_both_graphs,),
    "find": (swapping.check_find,),
    "refuse": (swapping.check_refusals,),
    "swap": (swapping.check_swaps,),
    "whole": (swapping.check_backend, swapping.check_kernels),
}
PART_GATES: dict[str, tuple[str, ...]] = {
    "show": ("rows", "groups"),
    "chain": ("factor", "exact"),
    "neutral": ("factor",),
    "silu": ("replace",),
    "gelu": ("replace", "values"),
    "backend": ("rewrite",),
    "whole": ("find", "refuse", "swap"),
}
"""Gate -> the gates whose functions it calls, in the order of the file."""
SUMMARIES = {
    "chain": f"{len(folding.CHAIN_CASES)} functions, bit for bit",
    "neutral": f"{len(folding.NEUTRAL_CASES)} functions, bit for bit",
    "silu": f"{len(matching.SILU_CASES)} functions, values and gradients",
    "gelu": f"{len(matching.GELU_CASES)} spellings, values and gradients",
    "exact": "every value of the 16-bit types",
    "find": f"{len(models.PATTERNS)} spellings",
    "swap": "values and gradients of 11 models",
}


class BackendChecker(PythonChecker):
    """Runs the checks of each gate of a file until one fails."""

    def get_time_limit(self, cases: list[Case]) -> float:
        return 5 * super().get_time_limit(cases)  # torch.compile may run a C++ compiler for a dozen models

    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        error = find_error(gate.id, module, path)
        if error and (part := self._find_wrong_part(gate.id, module, path)):
            return self.make_wrong_result(gate, [format_pointer(part)], ladder_gate=part)
        if error:
            lines = [f"{error.kind}: {error}"]
            if error.kind in FIXES:
                lines.append(f"what to do: {FIXES[error.kind]}")
            return self.make_wrong_result(gate, lines, error.kind)
        return GateResult(gate, "correct", summary=SUMMARIES.get(gate.id, ""))

    def _find_wrong_part(self, gate: str, module: Module, path: Path) -> str:
        """Return a gate's first wrong part if the gate passes with the solution's parts, else ""."""
        wrong = [part for part in PART_GATES.get(gate, ()) if find_error(part, module, path)]
        if not wrong:
            return ""
        solution = load_module(roots.get_solutions() / self.puzzle.name / self.rung.file)
        repaired = load_module(path)
        repaired.update({part: solution[part] for part in wrong})  # the globals of the file's functions
        return "" if find_error(gate, repaired, path) else wrong[0]


KNOWN_EXCEPTIONS = {
    "Tried to erase Node": "erased-in-use",
    "compiler_fn did not return callable": "not-callable",
}
"""Text in an exception of PyTorch -> the mistake that causes it."""


def find_error(gate: str, module: Module, path: Path) -> CheckError | None:
    """Return a gate's first failure, with its line; an exception in the learner's code is a failure."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for check in CHECKS[gate]:
            try:
                check(module)
            except CheckError as failure:
                return add_line(failure, path, gate)
            except Exception as error:  # an exception in the learner's code is a result
                original = find_original_exception(error)
                if isinstance(original, CheckError):
                    return add_line(original, path, gate)
                message = f"{locate_line(original, path, gate)}{type(original).__name__}: {' '.join(str(original).split())[:300]}"
                mistake = next((kind for text, kind in KNOWN_EXCEPTIONS.items() if text in message), "raises")
                return CheckError(mistake, message)
            finally:
                torch._dynamo.reset()
    return None


def add_line(failure: CheckError, path: Path, gate: str) -> CheckError:
    """Prefix a failure caused by an exception with the exception's line in the learner's file."""
    error = failure.__cause__ and find_original_exception(failure.__cause__)
    if error is None or isinstance(error, CheckError):  # a wrong result, not an exception
        return failure
    return CheckError(failure.kind, f"{locate_line(error, path, gate)}{failure}")


def locate_line(error: BaseException, path: Path, gate: str) -> str:
    """Return the line of the learner's file that raised an exception, "PATH:12: ", or the blank's line."""
    return (
        locate_error(error, path)
        or f"{path}:{blanks.find_blanks(blanks.read_source(path))[gate].line}: in the graph that it leaves: "
    )
