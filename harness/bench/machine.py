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
def machine(device: torch.device) -> dict[str, str]:
    """Return the first fields of every row."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {cpu_name()}"
    return {
        "device": name,
        "driver": driver() if device.type == "cuda" else "",
        "torch": torch.__version__,
        "triton": version("triton"),
        "max": version("max"),
        "date": datetime.date.today().isoformat(),
    }


def version(distribution: str) -> str:
    """Return the version of an installed package, or nothing."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def driver() -> str:
    """Return the version of the NVIDIA driver, or nothing if nvidia-smi does not report it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(
            command, capture_output=True, text=True, encoding="utf-8", errors="replace", timeout=20
        ).stdout.split("\n")[0]
    except (OSError, subprocess.TimeoutExpired):
        return ""


def cpu_name() -> str:
    """Return the model of this machine's CPU, how many cores this process may use, and its architecture."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*: (.*)$", text, re.M)
    return f"{model[1] if model else platform.machine()}, {torch.get_num_threads()} threads"
