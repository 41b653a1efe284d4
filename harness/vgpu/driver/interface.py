"""The driver's interface as data for both sides: device.py implements it, build.py generates Mojo from it."""

from __future__ import annotations

from enum import IntEnum

# Words of a request: operation, address and length of input, address and length of output, arguments.
REQUEST_WORDS = 16
FIRST_ARGUMENT = 5


Op = IntEnum(
    "Op",
    "HELLO ATTRIBUTE DEVICE_NAME MEMORY_INFO ALLOCATE FREE WRITE READ COPY FILL LOAD_MODULE UNLOAD_MODULE "
    "FIND_FUNCTION FIND_GLOBAL FUNCTION_ATTRIBUTE SET_FUNCTION_ATTRIBUTE OCCUPANCY LAUNCH ADDRESS_RANGE CLOCK "
    "UNSUPPORTED ENCODE_TENSOR_MAP",
)
"""Operations of a request; in Mojo OP_HELLO and so on."""

RESULTS = {
    "CUDA_SUCCESS": (0, "no error"),
    "CUDA_ERROR_INVALID_VALUE": (1, "invalid argument"),
    "CUDA_ERROR_OUT_OF_MEMORY": (2, "out of memory"),
    "CUDA_ERROR_NOT_INITIALIZED": (3, "initialization error"),
    "CUDA_ERROR_NO_DEVICE": (100, "no CUDA-capable device is detected"),
    "CUDA_ERROR_INVALID_DEVICE": (101, "invalid device ordinal"),
    "CUDA_ERROR_INVALID_IMAGE": (200, "device kernel image is invalid"),
    "CUDA_ERROR_INVALID_PTX": (218, "a PTX JIT compilation failed"),
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION": (
        222,
        "the provided PTX was compiled with an unsupported toolchain.",
    ),
    "CUDA_ERROR_OPERATING_SYSTEM": (304, "OS call failed or operation not supported on this OS"),
    "CUDA_ERROR_INVALID_HANDLE": (400, "invalid resource handle"),
    "CUDA_ERROR_NOT_FOUND": (500, "named symbol not found"),
    "CUDA_ERROR_ILLEGAL_ADDRESS": (700, "an illegal memory access was encountered"),
    "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES": (701, "too many resources requested for launch"),
    "CUDA_ERROR_LAUNCH_TIMEOUT": (702, "the launch timed out and was terminated"),
    "CUDA_ERROR_ILLEGAL_INSTRUCTION": (715, "an illegal instruction was encountered"),
    "CUDA_ERROR_MISALIGNED_ADDRESS": (716, "misaligned address"),
    "CUDA_ERROR_LAUNCH_FAILED": (719, "unspecified launch failure"),
    "CUDA_ERROR_NOT_SUPPORTED": (801, "operation not supported"),
    "CUDA_ERROR_INVALID_CLUSTER_SIZE": (
        912,
        "a kernel launch error has occurred due to cluster misconfiguration",
    ),
    "CUDA_ERROR_UNKNOWN": (999, "unknown error"),
}
"""The CUDA results that the virtual GPU returns: name -> (code, text of cuGetErrorString).
In Mojo they are named SUCCESS, INVALID_VALUE and so on, and `describe_result` looks them up."""
RESULT_CODES = {name: code for name, (code, _) in RESULTS.items()}

# Opaque handles of the only device, context, stream and memory pool.
CONTEXT, STREAM, POOL, NVML_DEVICE = 0x1000, 0x2000, 0x4000, 0x8000

CONSTANT_OUTPUTS = {
    "libcuda.so.1": {
        "workbook_vgpu_no_op": (),
        "cuDriverGetVersion": ((0, "Int32", 13000),),
        "cuDeviceGetCount": ((0, "Int32", 1),),
        "cuDeviceCanAccessPeer": ((0, "Int32", 0),),
        "cuDeviceGetMemPool": ((0, "Int", POOL),),
        "cuDeviceGetGraphMemAttribute": ((2, "Int", 0),),
        "cuDevicePrimaryCtxRetain": ((0, "Int", CONTEXT),),
        "cuCtxGetStreamPriorityRange": ((0, "Int32", 0), (1, "Int32", 0)),
        "cuStreamCreate": ((0, "Int", STREAM),),
        "cuStreamIsCapturing": ((1, "Int32", 0),),
    },
    "libnvidia-ml.so.1": {
        "nvmlShutdown": (),
        "nvmlDeviceGetCount_v2": ((0, "Int32", 1),),
        "nvmlDeviceGetHandleByIndex": ((1, "Int", NVML_DEVICE),),
        "nvmlDeviceGetMigMode": ((1, "Int32", 0), (2, "Int32", 0)),
        "nvmlDeviceGetTotalEccErrors": ((3, "Int", 0),),
        "nvmlDeviceGetCurrentClocksThrottleReasons": ((1, "Int", 0),),
        "nvmlDeviceGetComputeRunningProcesses_v3": ((1, "Int32", 0),),
    },
}
"""Library -> function with constant outputs -> (output argument, type, value)."""
ALIASES = {
    "libcuda.so.1": {
        "cuMemAlloc_v2": "cuMemAllocAsync",
        "cuMemFree_v2": "cuMemFreeAsync",
        "cuMemHostAlloc": "cuMemAllocHost_v2",
        "cuMemcpyHtoD_v2": "cuMemcpyHtoDAsync_v2",
        "cuMemcpyDtoH_v2": "cuMemcpyDtoHAsync_v2",
        "cuMemcpy": "cuMemcpyAsync cuMemcpyDtoD_v2 cuMemcpyDtoDAsync_v2",
        "cuMemcpyPeer": "cuMemcpyPeerAsync",
        "cuMemcpy2D_v2": "cuMemcpy2DUnaligned_v2 cuMemcpy2DAsync_v2",
        **{
            f"cuMemset{kind}_v2": f"cuMemset{kind}Async"
            for kind in ("D8", "D16", "D32", "D2D8", "D2D16", "D2D32")
        },
        "cuDeviceCanAccessPeer": "cuDeviceGetP2PAttribute",
        "cuDevicePrimaryCtxRetain": "cuCtxCreate_v2 cuCtxGetCurrent cuCtxPopCurrent",
        "cuStreamCreate": "cuStreamCreateWithPriority",
        "workbook_vgpu_no_op": (
            "cuMemPoolSetAccess cuMemPoolTrimTo cuDevicePrimaryCtxRelease_v2 cuCtxDestroy cuCtxSetCurrent "
            "cuCtxPushCurrent cuCtxEnablePeerAccess cuStreamDestroy cuStreamSynchronize cuStreamWaitEvent "
            "cuEventQuery cuEventSynchronize"
        ),
    },
    "libnvidia-ml.so.1": {
        "nvmlDeviceGetHandleByIndex": "nvmlDeviceGetHandleByIndex_v2 nvmlDeviceForCudaDevice",
    },
}
"""Library -> function -> aliases: variants with a stream, which is ignored, or with flags."""
UNSUPPORTED_FUNCTIONS = """
cuGraphAddChildGraphNode cuGraphAddEmptyNode cuGraphAddKernelNode cuGraphAddMemcpyNode
cuGraphAddMemsetNode cuGraphCreate cuGraphDebugDotPrint cuGraphDestroy cuGraphExecDestroy
cuGraphInstantiate cuGraphInstantiateWithFlags cuGraphInstantiateWithParams
cuGraphKernelNodeSetAttribute cuGraphLaunch cuMemAddressFree cuMemAddressReserve cuMemCreate
cuMemExportToShareableHandle cuMemGetAllocationGranularity cuMemGetHandleForAddressRange cuMemMap
cuMemRelease cuMemSetAccess cuMemUnmap cuMemcpyBatchAsync cuMulticastAddDevice cuMulticastBindMem
cuMulticastCreate cuMulticastGetGranularity cuMulticastUnbind cuPointerGetAttributes
cuPointerSetAttribute cuStreamBeginCapture cuStreamEndCapture cuStreamGetCaptureInfo_v2
cuStreamWaitValue64_v2 cuTensorMapEncodeIm2col
"""
"""Functions that MAX looks up in libcuda.so.1; they log their name and return CUDA_ERROR_NOT_SUPPORTED."""


def generate_constants() -> str:
    """Generate the Mojo module `interface`: operation numbers, result codes, and names of results."""
    lines = [f"comptime OP_{op.name} = {op.value}" for op in Op]
    lines += [
        f"comptime {name.removeprefix('CUDA_').removeprefix('ERROR_')} = Int32({code})"
        for name, code in RESULT_CODES.items()
    ]
    lines.append("def describe_result(code: Int32) -> Tuple[StaticString, StaticString]:")
    for name, (code, text) in RESULTS.items():
        lines += [f"    if code == {code}:", f'        return "{name}", "{text}"']
    lines += ['    return "CUDA_ERROR_UNKNOWN", "unknown error"', ""]
    return "\n".join(lines)


def generate_entry_points(library: str) -> str:
    """Generate a library's Mojo functions with constant outputs, and libcuda.so.1's unsupported ones."""
    lines = []
    for name, outputs in CONSTANT_OUTPUTS[library].items():
        last = max((argument for argument, _, _ in outputs), default=-1)
        arguments = ", ".join(f"a{k}: Int" for k in range(last + 1))
        lines += [f'@export("{name}")', f'def {name}({arguments}) abi("C") -> Int32:']
        for argument, kind, value in outputs:
            lines += [f"    if a{argument} != 0:", f"        at[{kind}](a{argument})[] = {value}"]
        lines.append("    return SUCCESS")
    for name in UNSUPPORTED_FUNCTIONS.split() if library == "libcuda.so.1" else ():
        lines += [
            f'@export("{name}")',
            f'def {name}() abi("C") -> Int32:',
            f'    return unsupported("{name}")',
        ]
    return "\n".join(lines) + "\n"
