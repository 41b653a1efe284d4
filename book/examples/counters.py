"""What the threads of puzzle 22's kernels ask for, counted by the virtual GPU (sm_90a) at the chapter's sizes.

Both variants run forward and backward with every check on. The table has a line for each launch.
"""

from harness.puzzles import p22
from harness.vgpu.speed import Replay, parse, record

recording = parse(record())

print("launch                    loaded   stored  atomics  sectors per load  barriers")
for variant in ("unfused", "fused"):
    replay = Replay(recording)
    replay.run(recording.case(variant, "float32", *p22.PUZZLE.dims))
    print(f"{variant}, forward and backward")
    loaded = stored = atomics = 0
    for launch in replay.gpu.launches:
        counted = launch.counters
        loads, stores = counted.global_load, counted.global_store
        print(
            f"  {launch.name:22} {loads.bytes:7,} {stores.bytes:8,} {counted.atomics:8,} "
            f"{loads.sectors_per_request:17.1f} {counted.barriers:9,}"
        )
        loaded, stored, atomics = loaded + loads.bytes, stored + stores.bytes, atomics + counted.atomics
    print(f"  {'all':22} {loaded:7,} {stored:8,} {atomics:8,}")
    print(f"  findings of the checks: {len(replay.gpu.findings)}")
