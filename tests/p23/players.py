"""Replays that several cases share: a virtual GPU reads each kernel once, which at small sizes takes longer than running it."""

from harness.devices.replay import Replay
from harness.vgpu.checks.findings import Findings


def anew(player: Replay, blocks: str = "natural") -> Replay:
    """The same without the launches and findings of the case before, for blocks in this order."""
    player.gpu.blocks, player.gpu.launches, player.gpu.findings = blocks, [], Findings()
    return player
