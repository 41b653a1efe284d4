"""`workbook vgpu`: run any program on the virtual GPU, or describe the device.

`exec` starts a program with stand-in CUDA libraries first on its library path and executes its kernels in
this process; `info` prints the device's limits and the path of its driver.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from harness.errors import EnvironmentProblem, UsageError

from .checks.findings import Checks, Finding, format_count, format_findings
from .driver import build, server
from .driver.device import ARCHITECTURES, Device, get_compute_capability, get_device_attributes
from .errors import StepBudgetExceeded, UnsupportedInstruction
from .machine import VirtualGPU

CHECKS = [field.name for field in dataclasses.fields(Checks) if field.default is True]

MAX_TIMEOUT_S = 10_000_000
"""The maximum timeout in seconds that the system's timers accept."""

EPILOG = """\
exit codes of exec: the program's own; 1 (--error-exitcode) if it ended with 0 but an error was found;
2 bad use; 5 the driver cannot be built or a kernel needs an instruction that is not supported;
124 time limit; 130 Ctrl-C

examples:
  workbook vgpu exec -- mojo run vector_add.mojo
  workbook vgpu exec --blocks reversed --timeout 60 -- ./my_program --size 100
  workbook vgpu exec --error-exitcode 99 --json findings.json -- mojo run -g1 vector_add.mojo
"""


def build_parser() -> argparse.ArgumentParser:
    parser_options: Any = {"epilog": EPILOG, "formatter_class": argparse.RawDescriptionHelpFormatter}
    root = argparse.ArgumentParser(
        prog="workbook vgpu",
        description="The virtual GPU: executes the PTX of Mojo GPU programs on the CPU and checks memory and"
        " races.",
        **parser_options,
    )
    commands = root.add_subparsers(dest="command", required=True, metavar="exec|info")
    usage = "%(prog)s [options] -- PROGRAM [ARGUMENT ...]"
    run = commands.add_parser("exec", help="run a program on the virtual GPU", usage=usage, **parser_options)
    run.add_argument("program", nargs=argparse.REMAINDER, metavar="PROGRAM", help="what to run, after --")
    help_text = "block order: natural, reversed or shuffled[:seed] (default natural)"
    run.add_argument("--blocks", default="natural", metavar="ORDER", help=help_text)
    help_text = f"all, none, or some of {','.join(CHECKS)} (default all)"
    run.add_argument("--checks", default="all", metavar="LIST", help=help_text)
    run.add_argument("--timeout", type=float, metavar="SECONDS", help="stop the program after this time")
    help_text = (
        "exit code, 1 to 255, if an error was found, also if the program's own is not 0 (default: 1, only if"
    )
    help_text += " the program's own is 0)"
    run.add_argument("--error-exitcode", type=int, default=1, metavar="N", help=help_text)
    run.add_argument("--json", metavar="FILE", help="write the findings to FILE (- for standard output)")
    run.add_argument("--verbose", action="store_true", help="one line for each kernel that is loaded or run")
    info = commands.add_parser("info", help="print the device's limits and the path of its driver")
    for command in (run, info):
        archs = [*ARCHITECTURES, "sm_90a"]
        command.add_argument("--arch", default="sm_90a", choices=archs, help="target (sm_90a)")
    return root


def main(argv: list[str]) -> int:
    options = build_parser().parse_args(argv)
    try:
        return execute(options) if options.command == "exec" else print_info(options)
    except (UsageError, EnvironmentProblem) as error:
        server.log(str(error))
        return error.exit_code


def parse_checks(text: str) -> Checks:
    """Parse the value of --checks. Raises UsageError for an unknown name."""
    names = {"all": CHECKS, "none": []}.get(text, text.split(","))
    if unknown := sorted(set(names) - set(CHECKS)):
        raise UsageError(
            f"unknown check {', '.join(unknown)}: choose all, none or some of {','.join(CHECKS)}"
        )
    return Checks(**{name: name in names for name in CHECKS})


def execute(options: argparse.Namespace) -> int:
    """Run `vgpu exec`: run the program, print the findings, return the exit code. Raises UsageError."""
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        raise UsageError("no program given: workbook vgpu exec -- PROGRAM [ARGUMENT ...]")
    if options.timeout is not None and not 0 < options.timeout <= MAX_TIMEOUT_S:
        raise UsageError(
            f"--timeout {options.timeout:g}: must be more than 0 and at most {MAX_TIMEOUT_S:,} seconds"
        )
    if not 1 <= options.error_exitcode <= 255:
        raise UsageError(f"--error-exitcode {options.error_exitcode}: must be from 1 to 255")
    # `exec` does not print counters.
    checks = dataclasses.replace(parse_checks(options.checks), counters=False)

    def make_device() -> Device:
        gpu = VirtualGPU(options.arch, checks=checks, block_order=options.blocks)
        return Device(gpu, options.arch, log=server.log, verbose=options.verbose)

    try:
        make_device()  # check the block order before starting anything
        executor = server.Executor(make_device, build.build())
        code = executor.run(program, options.timeout)
    except (ValueError, server.ProgramNotFound) as error:
        raise UsageError(str(error)) from None
    if code == server.TIMED_OUT:
        server.log(f"stopped after {options.timeout:g} s (--timeout)")
    result = summarise(executor.devices, options.arch, code, options.error_exitcode)
    if options.json:
        try:
            write_json(options.json, executor.devices, options.arch, code, result)
        except OSError as error:
            raise UsageError(f"--json {options.json}: {error.strerror}") from None
    return result


def summarise(devices: list[Device], arch: str, code: int, error_code: int = 1) -> int:
    """Print the findings and return the exit code.

    An error replaces the program's own code if that is 0, or if `error_code` is not the default 1.
    """
    findings = collect_findings(devices)
    launches = sum(len(device.gpu.launches) for device in devices)
    if findings:
        print(format_findings(findings), file=sys.stderr)
    errors = sum(finding.is_error for finding in findings)
    if any(finding.instr is not None and finding.instr.loc is None for finding in findings):
        server.log(
            "compile with -g1 (mojo run -g1, mojo build -g1) for source lines instead of PTX lines; only then are"
        )
        server.log("notes about the Mojo library distinguished from errors in your code")
    notes = len(findings) - errors
    summary = "the program ran no kernel" if not launches else format_count(launches, "launch", "launches")
    server.log(f"{arch}: {summary}, {format_count(errors, 'error')}, {format_count(notes, 'note')}")
    failures = {type(error) for device in devices for error in device.errors}
    has_failed = errors > 0 or StepBudgetExceeded in failures
    if code != 0 and not (has_failed and error_code != 1):
        return code
    if UnsupportedInstruction in failures:
        return 5
    return error_code if has_failed else 0


def collect_findings(devices: list[Device]) -> list[Finding]:
    return [finding for device in devices for finding in device.gpu.findings]


def write_json(file: str, devices: list[Device], arch: str, code: int, result: int):
    """Write exit codes, launches and findings (`Finding.to_dict`) as JSON."""
    data = {
        "device": f"virtual GPU ({arch})", "program_exit_code": code, "exit_code": result,
        "launches": sum(len(device.gpu.launches) for device in devices),
        "failures": [str(error) for device in devices for error in device.errors],
        "findings": [finding.to_dict() for finding in collect_findings(devices)],
    }  # fmt: skip
    text = json.dumps(data, indent=2, default=int) + "\n"
    if file == "-":
        print(text, end="")
    else:
        Path(file).write_text(text)


def print_info(options: argparse.Namespace) -> int:
    """Run `vgpu info`: print one property per line."""
    attributes = get_device_attributes(options.arch)
    major, minor = get_compute_capability(options.arch)
    driver = build.build()
    print(f"device               virtual GPU ({options.arch})")
    print(f"compute capability   {major}.{minor}")
    size = VirtualGPU(options.arch).arena.size / 2**30
    print(f"memory               {size:.1f} GiB, taken from this machine as needed")
    print(f"threads per block    {attributes[1]}")
    print(f"shared memory        {attributes[8]} bytes a block, up to {attributes[97]} on request")
    print(f"multiprocessors      {attributes[16]} (reported to programs; blocks run in any order)")
    print(f"driver               {driver.folder}")
    print("runs                 NVIDIA PTX up to Hopper's; not tcgen05, and no kernels for AMD and Apple")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
