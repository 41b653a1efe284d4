"""The build hook: what a wheel carries beside the code, so that layers and `workbook init` work without a checkout.

That is the solutions, the book's chapters, and the built book where there is one (`python -m book.build --no-open`).
Every op package, and the layers' kernels, get the shared folder that they link to: a wheel holds no links, and hatchling by itself takes a folder
only once, however many links lead to it.

Where the environment variable WORKBOOK_LIBRARIES names a folder that `workbook build-ext --output` has filled, the wheel carries the
built kernels and operators too, and is one for this platform.
"""

import os
import sysconfig

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CARRIED = {
    "solutions": os.path.join("harness", "_solutions"),
    os.path.join("solutions", "shared"): os.path.join("harness", "nn", "kernels", "shared"),
    os.path.join("book", "src"): os.path.join("harness", "_book", "src"),
    os.path.join("book", "html"): os.path.join("harness", "_book", "html"),
}
"""Folder of a checkout -> its place in a wheel; a source distribution, from which a wheel is made, keeps its place."""
LIBRARIES = "WORKBOOK_LIBRARIES"


class Carried(BuildHookInterface):
    """Adds what is carried, links followed, to a wheel and to a source distribution."""

    def initialize(self, version: str, build_data: dict) -> None:
        if version == "editable":
            return
        for source, place in CARRIED.items():
            self.add(source, place if self.target_name == "wheel" else source, build_data["force_include"])
        libraries = os.environ.get(LIBRARIES)
        if libraries and self.target_name == "wheel":
            self.add(libraries, os.path.join("harness", "_libraries"), build_data["force_include"])
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}

    def add(self, source: str, target: str, included: dict[str, str]) -> None:
        """Maps each file of a folder, which may be missing, to its path in what is built."""
        top = os.path.join(self.root, source)
        for folder, folders, names in os.walk(top, followlinks=True):
            folders[:] = [name for name in folders if name != "__pycache__"]
            for name in names:
                inside = os.path.relpath(os.path.join(folder, name), top)
                included[os.path.join(folder, name)] = os.path.join(target, inside)
