"""The build hook: the solution kernels travel inside the wheel, so that the layers work without a checkout.

Every op package gets the shared folder that it links to: a wheel holds no links, and hatchling by itself takes a folder
only once, however many links lead to it.
"""

import os

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Solutions(BuildHookInterface):
    """Adds `solutions/` to a wheel, as `harness/_solutions/`, and to a source distribution, from which a wheel is made."""

    def initialize(self, version: str, build_data: dict) -> None:
        if version == "editable":
            return
        target = os.path.join("harness", "_solutions") if self.target_name == "wheel" else "solutions"
        solutions = os.path.join(self.root, "solutions")
        for folder, folders, names in os.walk(solutions, followlinks=True):
            folders[:] = [name for name in folders if name != "__pycache__"]
            inside = os.path.relpath(folder, solutions)
            for name in names:
                path = os.path.normpath(os.path.join(target, inside, name))
                build_data["force_include"][os.path.join(folder, name)] = path
