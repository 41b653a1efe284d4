"""Link shared libraries on a machine without a C compiler.

`mojo build` calls `cc` as its linker. If there is none, a stand-in named `cc` translates the call for the
`lld` that is installed with mojo. It links shared libraries only: an executable needs the start-up files of a
C compiler.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def has_c_compiler(path: str | None = None) -> bool:
    """Check whether mojo would find a C compiler on the given PATH (default: the environment's)."""
    return any(shutil.which(name, path=path) for name in ("cc", "gcc", "clang"))


def environment_with_linker(folder: Path) -> dict[str, str]:
    """Return an environment in which `mojo build --emit shared-lib` can link.

    Unchanged if a C compiler is on the PATH; else the stand-in is written to `folder`, which goes first on
    the PATH.
    """
    env = dict(os.environ)
    if has_c_compiler(env.get("PATH", "")):
        return env
    stand_in = folder / "cc"
    stand_in.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" "$@"\n')
    stand_in.chmod(0o755)
    env["PATH"] = f"{folder}{os.pathsep}{env.get('PATH', '')}"
    return env


def find_lld() -> Path:
    """Return the linker installed with mojo: next to this Python, or next to the mojo on the PATH."""
    mojo = shutil.which("mojo")
    for folder in [Path(sys.executable).parent] + ([Path(mojo).parent] if mojo else []):
        if (folder / "lld").exists():
            return folder / "lld"
    raise FileNotFoundError("no C compiler on the PATH, and no lld next to mojo")


def c_library(maps: str) -> Path:
    """Return the libc.so.6 that a process uses, from the text of its /proc/PID/maps."""
    for line in maps.splitlines():
        if line.endswith("/libc.so.6"):
            return Path(line.split(maxsplit=5)[5])
    raise FileNotFoundError("libc.so.6 not found: the stand-in linker knows Linux with glibc only")


def lld_arguments(arguments: list[str], libc: Path) -> list[str]:
    """Return a `cc -shared ...` command line as lld's arguments: -Wl, and -Xlinker unwrapped, -lm as the file next to libc."""
    if "-shared" not in arguments:
        raise ValueError("without a C compiler only shared libraries can be linked (install gcc or clang)")
    out = ["-flavor", "gnu", "--as-needed"]
    for argument in arguments:
        if argument == "-Xlinker":
            continue
        if argument.startswith("-Wl,"):
            out += argument.split(",")[1:]
        elif argument == "-lm":
            out.append(str(libc.with_name("libm.so.6")))
        else:
            out.append(argument)
    return [*out, str(libc)]


def main(arguments: list[str]) -> int:
    """Link as `cc` would; the exit code is lld's."""
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    try:
        command = [str(find_lld()), *lld_arguments(arguments, c_library(maps))]
    except (FileNotFoundError, ValueError) as error:
        print(f"cc stand-in: {error}", file=sys.stderr)
        return 1
    return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
