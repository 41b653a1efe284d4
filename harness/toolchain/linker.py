"""Link shared libraries without a C compiler: a substitute `cc` calls `lld` for `mojo build`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path


def make_environment(folder: Path) -> dict[str, str]:
    """Return an environment in which `mojo build --emit shared-lib` can link.

    Without a C compiler on the PATH, write the substitute to `folder` and prepend it to the PATH.
    """
    env = dict(os.environ)
    if any(shutil.which(name, path=env.get("PATH", "")) for name in ("cc", "gcc", "clang")):
        return env
    substitute = folder / "cc"
    substitute.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" "$@"\n')
    substitute.chmod(0o755)
    env["PATH"] = f"{folder}{os.pathsep}{env.get('PATH', '')}"
    return env


def find_lld() -> Path:
    """Return the path of the lld next to this Python interpreter, or next to the mojo on the PATH."""
    mojo = shutil.which("mojo")
    for folder in [Path(sys.executable).parent] + ([Path(mojo).parent] if mojo else []):
        if (folder / "lld").exists():
            return folder / "lld"
    raise FileNotFoundError("no C compiler on the PATH, and no lld next to mojo")


def find_libc(maps: str) -> Path:
    """Return the path of a process's libc.so.6 from the text of its /proc/PID/maps."""
    for line in maps.splitlines():
        if line.endswith("/libc.so.6"):
            return Path(line.split(maxsplit=5)[5])
    raise FileNotFoundError(
        "libc.so.6 not found: the linker without a C compiler supports only Linux with glibc"
    )


def translate_arguments(arguments: list[str], libc: Path) -> list[str]:
    """Translate arguments of `cc -shared` for lld: unwrap -Wl, and -Xlinker, replace -lm by its file."""
    if "-shared" not in arguments:
        raise ValueError("without a C compiler only shared libraries can be linked (install gcc or clang)")
    translated = ["-flavor", "gnu", "--as-needed"]
    for argument in arguments:
        if argument == "-Xlinker":
            continue
        if argument.startswith("-Wl,"):
            translated += argument.split(",")[1:]
        elif argument == "-lm":
            translated.append(str(libc.with_name("libm.so.6")))
        else:
            translated.append(argument)
    return [*translated, str(libc)]


def main(arguments: list[str]) -> int:
    """Link like `cc`; return lld's exit code."""
    maps = os.fsdecode(Path("/proc/self/maps").read_bytes())
    try:
        command = [str(find_lld()), *translate_arguments(arguments, find_libc(maps))]
    except (FileNotFoundError, ValueError) as error:
        print(f"cc without a C compiler: {error}", file=sys.stderr)
        return 1
    return subprocess.call(command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
