"""Checker of puzzle 26's rungs: each gate by its checks, which raise a `Fault` if something is wrong."""

import contextlib
import io
import logging
from pathlib import Path

import torch

from harness.check.diagnose import sentence
from harness.check.python_files import PythonChecker, line_of, load
from harness.check.results import GateResult
from harness.learner import blanks
from harness.puzzles.p26 import composing, folding, matching, models, printing, swapping
from harness.puzzles.p26.mistakes import FIXES
from harness.puzzles.p26.trying import Check, Fault, Module, cause_of, tries
from harness.spec.puzzle import Case, Gate
from harness.toolchain import roots

logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns without CUDA

CHECKS: dict[str, tuple[Check, ...]] = {
    "rows": (printing.table,),
    "groups": (printing.grouping,),
    "show": (printing.answers, printing.shown),
    "history": (printing.counting,),
    "factor": (folding.factors,),
    "exact": (folding.same_bits,),
    "chain": (tries("fold", folding.CHAIN),),
    "neutral": (tries("drop_ones", folding.NEUTRAL),),
    "sweep": (tries("sweep", folding.SWEEP), folding.inputs_stay),
    "replace": (matching.replacing,),
    "silu": (tries("silu", matching.SILUS),),
    "values": (matching.computing,),
    "gelu": (matching.tanh_form, tries("gelu", matching.GELUS)),
    "rewrite": (composing.rewriting,),
    "backend": (composing.check_handoff, composing.check_inductor),
    "aot": (composing.check_both_graphs,),
    "find": (swapping.finding,),
    "refuse": (swapping.refusing,),
    "swap": (swapping.swapping,),
    "whole": (swapping.whole, swapping.with_kernels),
}
"""Gate -> its checks."""
PARTS: dict[str, tuple[str, ...]] = {
    "show": ("rows", "groups"),
    "chain": ("factor", "exact"),
    "neutral": ("factor",),
    "silu": ("replace",),
    "gelu": ("replace", "values"),
    "backend": ("rewrite",),
    "whole": ("find", "refuse", "swap"),
}
"""Gate -> the other gates' functions that its own calls, in the order in which they are written."""
SUMMARIES = {
    "chain": f"{len(folding.CHAIN)} functions, bit for bit",
    "neutral": f"{len(folding.NEUTRAL)} functions, bit for bit",
    "silu": f"{len(matching.SILUS)} functions, values and gradients",
    "gelu": f"{len(matching.GELUS)} spellings, values and gradients",
    "exact": "every value of the 16-bit types",
    "find": f"{len(models.PATTERNS)} ways to write it",
    "swap": "values and gradients of 11 models",
}


class BackendChecker(PythonChecker):
    """Checks the gates of one file, each by its checks until one raises a fault."""

    def limit(self, cases: list[Case]) -> float:
        return 5 * super().limit(cases)  # torch.compile may call a C++ compiler for a dozen models

    def _check_gate(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        fault = fault_of(gate.id, module, path)
        if fault and (part := self._wrong_part(gate.id, module, path)):
            return self.wrong(gate, [sentence(part)], of=part)
        if fault:
            lines = [f"{fault.kind}: {fault}"]
            if fault.kind in FIXES:
                lines.append(f"what to do: {FIXES[fault.kind]}")
            return self.wrong(gate, lines, fault.kind)
        return GateResult(gate, "correct", summary=SUMMARIES.get(gate.id, ""))

    def _wrong_part(self, gate: str, module: Module, path: Path) -> str:
        """Return the first wrong part of a gate that alone causes the fault: with the solution's parts the
        gate passes."""
        wrong = [part for part in PARTS.get(gate, ()) if fault_of(part, module, path)]
        if not wrong:
            return ""
        solution = load(roots.solutions() / self.puzzle.name / self.rung.file)
        mended = load(path)
        mended.update({part: solution[part] for part in wrong})  # the globals of the file's functions
        return "" if fault_of(gate, mended, path) else wrong[0]


SAID = {"Tried to erase Node": "erased-in-use", "compiler_fn did not return callable": "not-callable"}
"""Words of an exception of PyTorch's -> the mistake that they name."""


def fault_of(gate: str, module: Module, path: Path) -> Fault | None:
    """Return the first fault of a gate's checks; an exception of the learner's code is one, with its line."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for check in CHECKS[gate]:
            try:
                check(module)
            except Fault as fault:
                return with_line(fault, path, gate)
            except Exception as error:  # an exception of the learner's code is a result
                inner = cause_of(error)
                if isinstance(inner, Fault):
                    return with_line(inner, path, gate)
                words = (
                    f"{where(inner, path, gate)}{type(inner).__name__}: {' '.join(str(inner).split())[:300]}"
                )
                kind = next((kind for text, kind in SAID.items() if text in words), "raises")
                return Fault(kind, words)
            finally:
                torch._dynamo.reset()
    return None


def with_line(fault: Fault, path: Path, gate: str) -> Fault:
    """Prefix a fault with the line of the learner's file if an exception caused it."""
    error = fault.__cause__ and cause_of(fault.__cause__)
    if error is None or isinstance(error, Fault):  # not an exception, but a result
        return fault
    return Fault(fault.kind, f"{where(error, path, gate)}{fault}")


def where(error: BaseException, path: Path, gate: str) -> str:
    """Return the line of the learner's file that raised an exception, "PATH:12: "; else that of the blank
    whose graph did."""
    return (
        line_of(error, path)
        or f"{path}:{blanks.find(blanks.read(path))[gate].line}: in the graph that it leaves: "
    )
