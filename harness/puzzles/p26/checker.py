"""What judges the rungs of puzzle 26: each gate by its checks, which end in a `Fault` where something is wrong."""

import contextlib
import io
import logging
from pathlib import Path

import torch

from harness.check.python_files import PythonChecker, describe
from harness.check.results import GateResult
from harness.puzzles.p26 import composing, folding, matching, models, printing, swapping
from harness.puzzles.p26.mistakes import FIXES
from harness.puzzles.p26.trying import Check, Fault, Module, cause_of, tries
from harness.spec.puzzle import Case, Gate

logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it warns where there is no CUDA

CHECKS: dict[str, tuple[Check, ...]] = {
    "rows": (printing.table,),
    "groups": (printing.grouping,),
    "show": (printing.answers, printing.shown),
    "history": (printing.counting,),
    "factor": (folding.factors,),
    "exact": (folding.same_bits,),
    "chain": (tries("fold", folding.CHAIN),),
    "neutral": (tries("drop_ones", folding.NEUTRAL),),
    "sweep": (tries("sweep", folding.SWEEP),),
    "replace": (matching.replacing,),
    "silu": (tries("silu", matching.SILUS),),
    "values": (matching.computed,),
    "gelu": (
        matching.tanh_form,
        tries("gelu", matching.GELUS),
    ),
    "rewrite": (composing.rewriting,),
    "backend": (composing.handing_on, composing.by_inductor),
    "aot": (composing.both_graphs,),
    "find": (swapping.finding,),
    "refuse": (swapping.refusing,),
    "swap": (swapping.swapping,),
    "whole": (swapping.whole, swapping.with_kernels),
}
"""Gate -> its checks."""
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
    """Judges the gates of one file, each by its checks until one finds a fault."""

    def limit(self, cases: list[Case]) -> float:
        return 5 * super().limit(cases)  # torch.compile may call a C++ compiler for a dozen models

    def _judge(self, gate: Gate, module: dict, path: Path, cases: list[Case]) -> GateResult:
        hint = f"{self.puzzle.ladder(self.rung, gate.id)}-1"
        fault = fault_of(gate.id, module, path)
        if fault:
            lines = [f"{fault.kind}: {fault}"]
            if fault.kind in FIXES:
                lines.append(f"what to do: {FIXES[fault.kind]}")
            return GateResult(gate, "wrong", diagnosis=lines, mistake=fault.kind, hint=hint)
        return GateResult(gate, "correct", summary=SUMMARIES.get(gate.id, ""))


def fault_of(gate: str, module: Module, path: Path) -> Fault | None:
    """The first fault that the checks of a gate find; what the learner's code raises is one."""
    with contextlib.redirect_stdout(io.StringIO()):
        for check in CHECKS[gate]:
            try:
                check(module)
            except Fault as fault:
                return fault
            except Exception as error:  # whatever a learner's code raises is a verdict
                inner = cause_of(error)
                if isinstance(inner, Fault):
                    return inner
                words = describe(inner, path)[:300]
                return Fault("erased-in-use" if "Tried to erase Node" in words else "raises", words)
            finally:
                torch._dynamo.reset()
    return None
