"""The wheel's build hook: the solution kernels travel inside the package, so that the layers work without a checkout.

Every op package gets the shared folder that it links to: a wheel holds no links, and hatchling's own `force-include`
takes a folder only once, however many links lead to it.
"""

import os

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Solutions(BuildHookInterface):
    """Adds `solutions/` as `harness/_solutions/`."""

    def initialize(self, version: str, build_data: dict) -> None:
        for folder, folders, names in os.walk(os.path.join(self.root, "solutions"), followlinks=True):
            folders[:] = [name for name in folders if name != "__pycache__"]
            inside = os.path.relpath(folder, os.path.join(self.root, "solutions"))
            for name in names:
                target = os.path.normpath(os.path.join("harness", "_solutions", inside, name))
                build_data["force_include"][os.path.join(folder, name)] = target
