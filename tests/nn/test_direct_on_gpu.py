"""The direct way on a real GPU: values, memory, streams, graphs and torch.compile."""

import copy
import threading

import pytest
import torch
from direct_module import DTYPES, gpu_inputs, sequential
from layer_checks import (
    EPS,
    NAMES,
    O,
    assert_as_good_as_torch,
    assert_near,
    layer_from,
    make_inputs,
    output_and_gradients,
    plain_torch,
)
from typed import loosely, present

from harness.nn import autograd, layernorm_direct, layernorm_plan, layers

fused_layernorm_linear = loosely(layers.fused_layernorm_linear)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "width", "outputs"),
    [
        ((3, 5), 7, 6),
        ((1,), 8, 16),
        ((4, 4), 8, 16),
        ((257,), 129, 65),
        ((2, 100), 768, 320),
        ((130,), 2056, 24),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_agrees_with_autograd(kernels, counted, dtype, rows, width, outputs):
    assert_as_good_as_torch(fused_layernorm_linear, gpu_inputs(dtype, rows, width, outputs))
    plan = layernorm_plan.make_plan(torch.Size([*rows, width]), outputs, dtype, False, kernels.hopper)
    own = plan.choice.plain == layernorm_plan.ALL_OWN
    assert counted == (["launch_forward", "launch_backward"] if own else ["launch_backward"])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_gpu_at_the_size_of_a_model(kernels, dtype):
    assert_as_good_as_torch(fused_layernorm_linear, gpu_inputs(dtype, (4, 1024), 768, 3072))


@pytest.mark.gpu
def test_gpu_a_million_rows(kernels):
    assert_as_good_as_torch(fused_layernorm_linear, gpu_inputs(rows=(1_000_003,), H=9, O=4))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gpu_products_of_torch(counted, dtype):
    assert_as_good_as_torch(fused_layernorm_linear, gpu_inputs(dtype, (12_000,), 259, 131))
    assert counted == ["launch_backward"], "above LIBRARY_FROM_IN_A_LOOP the rows alone are the module's"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "sizes",
    [((64,), 264, 256), ((1024,), 768, 1024), ((4096,), 768, 3072)],
    ids=["own products", "torch's", "torch's along the sums"],
)
def test_gpu_tf32_is_as_good_as_torch_s(kernels, sizes):
    before = torch.backends.cuda.matmul.fp32_precision
    inputs = gpu_inputs(torch.float32, *sizes)
    try:
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        exact = fused_layernorm_linear(*inputs)
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert not torch.equal(fused_layernorm_linear(*inputs), exact), "the flag changes nothing"
        assert_as_good_as_torch(fused_layernorm_linear, inputs)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("which", range(5), ids=NAMES)
def test_gpu_unaligned_tensors(counted, dtype, which):
    """A slice that begins one element after an aligned address."""
    inputs = gpu_inputs(dtype, (9,), 264, 24)

    def function(*tensors):
        tensors = list(tensors)
        memory = torch.cat([tensors[which].new_zeros(1), tensors[which].flatten()])
        tensors[which] = memory[1:].view_as(tensors[which])
        assert tensors[which].data_ptr() % layernorm_direct.VECTOR and tensors[which].is_contiguous()
        return fused_layernorm_linear(*tensors)

    assert_as_good_as_torch(function, inputs)
    assert counted == ["launch_forward", "launch_backward"]


@pytest.mark.gpu
def test_gpu_strided_tensors(kernels):
    inputs = gpu_inputs(rows=(6, 4))
    grad_output = torch.ones(O, 6, 4, device="cuda").permute(1, 2, 0)

    def function(x, ln_weight, ln_bias, linear_weight, linear_bias):
        x = x.transpose(0, 1).contiguous().transpose(0, 1)
        return fused_layernorm_linear(
            x, ln_weight, ln_bias, linear_weight.repeat_interleave(2, 1)[:, ::2], linear_bias
        )

    assert_as_good_as_torch(function, inputs, grad_output)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [((4, 300), 776, 520), ((4, 4), 8, 16)], ids=["large", "small"])
def test_gpu_same_bits_every_time(kernels, sizes):
    inputs = gpu_inputs(torch.bfloat16, *sizes)
    first = output_and_gradients(fused_layernorm_linear, inputs)
    for _ in range(50):
        again = output_and_gradients(fused_layernorm_linear, inputs)
        assert all(map(torch.equal, first, again))


@pytest.mark.gpu
def test_gpu_gradcheck(kernels):
    assert torch.autograd.gradcheck(fused_layernorm_linear, gpu_inputs(torch.float64, (4,)))


@pytest.mark.gpu
def test_gpu_zero_rows(kernels):
    _, *gradients = output_and_gradients(fused_layernorm_linear, gpu_inputs(rows=(0,)))
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


@pytest.mark.gpu
def test_gpu_out_of_memory(kernels):
    """4 TiB of results; what is there already is left alone."""
    x, one = torch.ones(2**20, 1, device="cuda"), torch.ones(1, device="cuda")
    with pytest.raises(
        torch.OutOfMemoryError, match=r"1048576 rows, 1 -> 1048576 in float32, needed 4,398,\d+,\d+"
    ):
        fused_layernorm_linear(x, one, one, x, x[:, 0])
    assert fused_layernorm_linear(*gpu_inputs()).isfinite().all()


def side_stream_work(inputs_of, function, repeats, size=4096):
    """Results of `function` on a side stream, its inputs rewritten there just before each call, behind a long kernel."""
    stream = torch.cuda.Stream()
    busy = torch.randn(size, size, device="cuda")
    leaves = [torch.zeros_like(tensor).requires_grad_() for tensor in inputs_of(0)]
    sources = [inputs_of(seed) for seed in range(repeats)]
    torch.cuda.synchronize()
    got = []
    with torch.cuda.stream(stream):
        for source in sources:
            busy = busy @ busy * 1e-4
            with torch.no_grad():
                for leaf, tensor in zip(leaves, source, strict=True):
                    leaf.copy_(tensor)
            output = function(*leaves)
            gradients = torch.autograd.grad(output, leaves, torch.ones_like(output))
            got.append([tensor.detach().clone() for tensor in (output, *gradients)])
    stream.synchronize()
    return got


@pytest.mark.gpu
def test_gpu_threads_with_streams_of_their_own(kernels):
    results, raised = {}, []

    def inputs_of(thread):
        return lambda seed: gpu_inputs(rows=(64 + thread,), seed=100 * thread + seed, requires_grad=False)

    def work(thread):
        try:
            results[thread] = side_stream_work(inputs_of(thread), fused_layernorm_linear, 10, 1024)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not raised
    for thread, found in results.items():
        for seed, ours in enumerate(found):
            inputs = inputs_of(thread)(seed)
            ones = torch.ones(inputs[0].shape[0], O)
            for mine, theirs in zip(ours, output_and_gradients(plain_torch, inputs, ones), strict=True):
                assert_near(mine, theirs)


@pytest.mark.gpu
def test_gpu_graph_captures_both_passes(kernels):
    inputs = gpu_inputs(rows=(32,))
    grad_output = torch.ones(32, O, device="cuda")

    def step():
        output = fused_layernorm_linear(*inputs)
        return [output, *torch.autograd.grad(output, inputs, grad_output)]

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(5):
        with torch.no_grad():
            for tensor, fresh in zip(inputs, gpu_inputs(rows=(32,), seed=seed), strict=True):
                tensor.copy_(fresh)
        graph.replay()
        expected = output_and_gradients(plain_torch, inputs, grad_output)
        for ours, theirs in zip(captured, expected, strict=True):
            assert_near(ours.detach(), theirs)


@pytest.mark.gpu
def test_gpu_graph_of_a_layer_whose_plain_calls_multiply_otherwise(kernels):
    """A capture can load no kernel: the plain call before has launched those of the graph too."""
    inputs = gpu_inputs(torch.bfloat16, (64,), 768, 776)
    choice = layernorm_plan.make_plan(inputs[0].shape, 776, torch.bfloat16, False, kernels.hopper).choice
    grad_output = torch.randn(64, 776, dtype=torch.bfloat16, device="cuda")

    def run():
        output = fused_layernorm_linear(*inputs)
        return output.detach(), *torch.autograd.grad(output, inputs, grad_output)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        plain = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    graph.replay()
    torch.cuda.synchronize()
    assert not kernels.hopper or choice.plain != choice.captured
    for mine, theirs in zip(captured, plain, strict=True):
        assert (mine - theirs).norm() < 1e-2 * theirs.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_gpu_compiled(counted, mode):
    torch._dynamo.reset()
    reference = sequential().cuda()
    layer = layer_from(copy.deepcopy(reference))
    compiled = torch.compile(layer, fullgraph=True, mode=mode)
    for seed in range(5):
        x, y = (gpu_inputs(rows=(2, 3), seed=seed)[0] for _ in range(2))
        torch.compiler.cudagraph_mark_step_begin()
        # As in training: a gradient that is kept lies in the memory of the graph that the next step replays.
        layer.zero_grad()
        reference.zero_grad()
        compiled(x).square().sum().backward()
        reference(y).square().sum().backward()
        assert_near(x.grad, y.grad)
        for mine, theirs in zip(layer.parameters(), reference.parameters(), strict=True):
            assert_near(mine.grad, theirs.grad)
    assert counted
    torch._dynamo.reset()


@pytest.mark.gpu
def test_gpu_compiled_with_changing_lengths(kernels):
    torch._dynamo.reset()
    reference = sequential().cuda()
    compiled = torch.compile(layer_from(copy.deepcopy(reference)), fullgraph=True)
    for rows in (3, 4):
        compiled(gpu_inputs(rows=(2, rows))[0]).sum().backward()
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (5, 17, 2):
            x = gpu_inputs(rows=(2, rows))[0]
            assert_near(compiled(x), reference(x))
    torch._dynamo.reset()


@pytest.mark.gpu
def test_gpu_autocast(counted):
    layer = layer_from(sequential()).cuda()
    x = gpu_inputs()[0]
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output = layer(x)
    output.float().square().sum().backward()
    assert output.dtype == torch.bfloat16 and present(x.grad).dtype == torch.float32
    assert counted == ["launch_forward", "launch_backward"]


@pytest.mark.gpu
@pytest.mark.parametrize("biases", [True, False], ids=["all", "no biases"])
def test_gpu_opcheck(kernels, biases):
    inputs = gpu_inputs() if biases else [*gpu_inputs()[:2], None, gpu_inputs()[3], None]
    torch.library.opcheck(autograd.layernorm_linear, (*inputs, EPS, "fast"))


@pytest.mark.gpu(count=2)
def test_gpu_the_second_of_two():
    """The tensors decide, not the current device, which stays as it is."""
    inputs = [tensor.detach().to("cuda:1").requires_grad_() for tensor in make_inputs()]
    with torch.cuda.device(0):
        assert_as_good_as_torch(fused_layernorm_linear, inputs)
        assert torch.cuda.current_device() == 0
    assert present(layernorm_direct.kernels.table[1]).index == 1
