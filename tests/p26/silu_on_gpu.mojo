"""SiLU's kernels on a GPU, real or virtual: prints x, y and dx of 300 numbers."""

from max.gpu.host import DeviceContext
from op.shared.launcher import DeviceLauncher
from op.silu import launch_silu, launch_silu_backward

comptime COUNT = 300
comptime dtype = DType.float32


def main() raises:
    with DeviceContext() as ctx:
        var x = ctx.enqueue_create_buffer[dtype](COUNT)
        var dy = ctx.enqueue_create_buffer[dtype](COUNT)
        var y = ctx.enqueue_create_buffer[dtype](COUNT)
        var dx = ctx.enqueue_create_buffer[dtype](COUNT)
        with x.map_to_host() as host:
            for i in range(COUNT):
                host[i] = Float32(i - 150) / 10
        with dy.map_to_host() as host:
            for i in range(COUNT):
                host[i] = 1 + Float32(i % 7)
        var launcher = DeviceLauncher(ctx)
        launch_silu[dtype](
            launcher,
            y.unsafe_ptr().as_unsafe_any_origin(),
            x.unsafe_ptr().as_unsafe_any_origin().as_imm(),
            Int32(COUNT),
        )
        launch_silu_backward[dtype](
            launcher,
            dx.unsafe_ptr().as_unsafe_any_origin(),
            dy.unsafe_ptr().as_unsafe_any_origin().as_imm(),
            x.unsafe_ptr().as_unsafe_any_origin().as_imm(),
            Int32(COUNT),
        )
        with y.map_to_host() as ours:
            with dx.map_to_host() as gradient:
                for i in range(COUNT):
                    print(ours[i], gradient[i])
