"""Describe the machine of a measurement: device, driver, versions and date."""

import datetime
import functools
import importlib.metadata
import platform
import re
import subprocess
from pathlib import Path

import torch


@functools.cache
def describe_machine(device: torch.device) -> dict[str, str]:
    """Return the CSV fields that describe the machine."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {get_cpu_name()}"
    return {
        "device": name,
        "driver": get_driver_version() if device.type == "cuda" else "",
        "torch": torch.__version__,
        "triton": get_version("triton"),
        "max": get_version("max"),
        "date": datetime.date.today().isoformat(),
    }


def get_version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def get_driver_version() -> str:
    """Return the NVIDIA driver's version, or "" if nvidia-smi does not report it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=20
        ).stdout.split("\n")[0]
    except (OSError, subprocess.TimeoutExpired):
        return ""


def get_cpu_name() -> str:
    """Return the CPU's model (its architecture if unknown) and the number of threads that PyTorch uses."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*: (.*)$", text, re.M)
    return f"{model[1] if model else platform.machine()}, {torch.get_num_threads()} threads"
