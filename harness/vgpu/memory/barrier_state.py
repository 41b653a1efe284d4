"""The state of one mbarrier: its phase, pending arrivals and bytes, and the threads and copies it orders."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class MBarrier:
    """One mbarrier: arrivals per phase and still pending, the current phase, and bytes still expected."""

    count: int
    pending_arrivals: int
    phase: int = 0
    pending_bytes: int = 0
    arriving_row: int = 0  # the merged rows of this phase's arrivals (async_order.py)
    arrived_row: int = 0  # the merged rows of all finished phases' arrivals
    copies: dict[int, list] = field(default_factory=dict)  # phase -> the asynchronous copies that signal it

    def get_state(self) -> tuple[int, ...]:
        """Return the part of the state that determines which threads may proceed."""
        return self.count, self.pending_arrivals, self.phase, self.pending_bytes

    def describe_missing(self) -> str:
        """Describe the arrivals and bytes that the phase still lacks."""
        text = f"lacks {self.pending_arrivals} of {self.count} arrivals"
        if self.pending_bytes > 0:
            text += f" and {self.pending_bytes} expected bytes of copies"
        if self.pending_bytes < 0:
            text += f", and copies have written {-self.pending_bytes} bytes more than expected"
        return text
