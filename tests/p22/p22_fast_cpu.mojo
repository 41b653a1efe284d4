"""Runs the fast CPU path of puzzle 22 on made-up numbers and prints what it writes: `mojo run --target-cpu CPU`.

One line for each dtype and tensor: dtype, name, elements. A test computes the same with NumPy; so the path is checked
for processors with narrower vectors and fewer registers than those of the machine that runs the tests.
"""

from std.memory.alloc import unsafe_alloc

from op.fast_cpu import backward_fast_cpu, forward_fast_cpu
from op.shared.common import MutPtr, accum_type
from op.tensors import BackwardTensors, ForwardTensors, Sizes

comptime ROWS = 35
comptime H = 37
comptime O = 70


def main() raises:
    run[DType.float32]()
    run[DType.float64]()
    run[DType.bfloat16]()
    run[DType.float16]()


def run[dtype: DType]() raises:
    """Forward and backward pass in one dtype."""
    comptime accum = accum_type[dtype]
    var input = numbers[dtype](ROWS * H, 7919).as_imm()
    var ln_weight = numbers[dtype](H, 31).as_imm()
    var ln_bias = numbers[dtype](H, 37).as_imm()
    var linear_weight = numbers[dtype](O * H, 7907).as_imm()
    var linear_bias = numbers[dtype](O, 41).as_imm()
    var grad_output = numbers[dtype](ROWS * O, 7001).as_imm()
    var output = numbers[dtype](ROWS * O, 0)
    var mean = numbers[accum](ROWS, 0)
    var rstd = numbers[accum](ROWS, 0)
    var grad_input = numbers[dtype](ROWS * H, 0)
    var grad_ln_weight = numbers[dtype](H, 0)
    var grad_ln_bias = numbers[dtype](H, 0)
    var grad_weight = numbers[dtype](O * H, 0)
    var grad_bias = numbers[dtype](O, 0)
    var sizes = Sizes(1, ROWS, H, O)
    forward_fast_cpu(
        ForwardTensors[dtype](
            output,
            mean,
            rstd,
            input,
            ln_weight,
            ln_bias,
            linear_weight,
            linear_bias,
            sizes.copy(),
            1e-5,
        )
    )
    backward_fast_cpu(
        BackwardTensors[dtype](
            grad_input,
            grad_ln_weight,
            grad_ln_bias,
            grad_weight,
            grad_bias,
            grad_output,
            input,
            mean.as_imm(),
            rstd.as_imm(),
            ln_weight,
            ln_bias,
            linear_weight,
            sizes^,
        )
    )
    show("output", output, ROWS * O)
    show("grad_input", grad_input, ROWS * H)
    show("grad_ln_weight", grad_ln_weight, H)
    show("grad_ln_bias", grad_ln_bias, H)
    show("grad_weight", grad_weight, O * H)
    show("grad_bias", grad_bias, O)


def numbers[dtype: DType](count: Int, step: Int) -> MutPtr[dtype]:
    """The numbers (i * step mod 61) / 32 - 1, which every dtype holds exactly."""
    var made = unsafe_alloc[Scalar[dtype]](count).as_unsafe_any_origin()
    for i in range(count):
        made[unsafe_offset=i] = (Float64(i * step % 61) / 32 - 1).cast[dtype]()
    return made


def show[dtype: DType](name: StaticString, values: MutPtr[dtype], count: Int):
    """Prints one tensor."""
    print(dtype, name, end="")
    for i in range(count):
        print("", values[unsafe_offset=i].cast[DType.float64](), end="")
    print()
