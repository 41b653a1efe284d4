"""An op whose atomic addition has the scope "device", which NVIDIA and Apple have and AMD calls "agent"."""

from std.atomic import Atomic
from extensibility import _MutableInputTensor as MutableInputTensor
import extensibility
from max.gpu.host import DeviceContext


def count_in_wrong_scope(sum: Pointer[Float32, MutAnyOrigin]):
    """Each thread adds 1."""
    _ = Atomic[Float32, scope="device"].fetch_add(sum, 1)


@extensibility.register("count")
struct Count:
    """How many threads there were."""

    @staticmethod
    def execute[
        target: StaticString
    ](sum: MutableInputTensor[dtype=DType.float32, rank=1, static_spec=_], ctx: DeviceContext) raises:
        comptime if target != "cpu":
            ctx.enqueue_function[count_in_wrong_scope](sum.unsafe_ptr(), grid_dim=1, block_dim=1)
