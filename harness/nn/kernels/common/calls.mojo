"""Calls over the C ABI: every exported function takes the address of an array of 64-bit words.

It returns the bytes of workspace that the call needs, or -1 and an error message in the caller's buffer. The
first four words describe the launcher: the result of `open_gpu`, or 0 to compute the workspace size without
launching; the stream's handle; the address of the workspace; its size in bytes. The caller,
`harness/nn/host`, checks the arguments.
"""

from std.memory import bitcast
from std.memory.alloc import unsafe_alloc

from shared.common import ImmPtr, MutPtr

from .stream_launcher import Gpu, StreamLauncher


struct Words:
    """The words of a call, read in order."""

    var items: Pointer[Int, MutUntrackedOrigin]
    var position: Int

    def __init__(out self, address: Int):
        self.items = Pointer[Int, MutUntrackedOrigin](unsafe_from_address=address)
        self.position = 0

    def integer(mut self) -> Int:
        """Return the next word."""
        self.position += 1
        return self.items[unsafe_offset=self.position - 1]

    def float(mut self) -> Float64:
        """Return the next word, the bits of a float64."""
        return bitcast[DType.float64](Int64(self.integer()))

    def output[dtype: DType](mut self) -> MutPtr[dtype]:
        """Return the next word, the address of a tensor to write, 0 for none."""
        return MutPtr[dtype](unsafe_from_address=self.integer())

    def input[dtype: DType](mut self) -> ImmPtr[dtype]:
        """Return the next word, the address of a tensor to read, 0 for none."""
        return ImmPtr[dtype](unsafe_from_address=self.integer())

    def launcher(mut self) raises -> StreamLauncher:
        """Return the launcher that the next four words describe."""
        var gpu = self.integer()
        var stream = self.integer()
        var workspace = self.integer()
        var available = self.integer()
        return StreamLauncher(gpu, stream, workspace, available) if gpu else StreamLauncher()


def call[
    launch: def(mut Words, mut StreamLauncher) raises thin -> None
](words: Int, message: Int, capacity: Int64) -> Int64:
    """Launch one pass and return the bytes of workspace that it needs; on error write a message and return
    -1.
    """
    try:
        var arguments = Words(words)
        var launcher = arguments.launcher()
        launch(arguments, launcher)
        return Int64(launcher.used)
    except error:
        write_message(String(error), message, Int(capacity))
        return -1


def open_gpu(index: Int64, message: Int, capacity: Int64) -> Int64:
    """Return a handle to GPU `index`, valid until the process exits; on error write a message and return 0.
    """
    try:
        var gpu = unsafe_alloc[Gpu](1)
        gpu.unsafe_write(Gpu(Int(index)))
        return Int64(Int(gpu))
    except error:
        write_message(String(error), message, Int(capacity))
        return 0


def write_message(message: String, buffer: Int, capacity: Int):
    """Write a message to the caller's buffer, truncated to fit and null-terminated."""
    if buffer == 0 or capacity <= 0:
        return
    var bytes = message.as_bytes()
    var count = min(len(bytes), capacity - 1)
    var target = Pointer[UInt8, MutUntrackedOrigin](unsafe_from_address=buffer)
    for i in range(count):
        target[unsafe_offset=i] = bytes[i]
    target[unsafe_offset=count] = 0
