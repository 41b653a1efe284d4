"""The state of one mbarrier: what its phase waits for, and how its arrivals and copies order threads."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class MBarrier:
    """One mbarrier: arrivals it counts and still lacks, its phase, and the bytes of copies that it still
    expects."""

    count: int
    pending: int
    phase: int = 0
    bytes: int = 0
    arriving: int = 0  # the merged rows of this phase's arrivals (order.py)
    arrived: int = 0  # the merged rows of all finished phases' arrivals
    copies: dict[int, list] = field(default_factory=dict)  # phase -> the asynchronous copies that it counts

    def state(self) -> tuple[int, ...]:
        """Return the part of the state that decides which threads may proceed."""
        return self.count, self.pending, self.phase, self.bytes

    def lacks(self) -> str:
        """Describe what the phase still lacks."""
        text = f"lacks {self.pending} of {self.count} arrivals"
        if self.bytes > 0:
            text += f" and {self.bytes} bytes of copies that it was told to expect"
        if self.bytes < 0:
            text += f", and copies have brought {-self.bytes} bytes more than it was told to expect"
        return text
