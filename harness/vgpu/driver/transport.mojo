"""Transport from the stand-in libraries to the executor of the virtual GPU.

Both libraries (libcuda.mojo, libnvml.mojo) only marshal C arguments; Python executes the calls (device.py). The
numbers of operations and results also come from Python: build.py writes the module `interface`. A call is a
`Request` of sixteen 64-bit words, sent over a socket to the executor process (`vgpu exec`).

The libraries may depend only on libc: no printing, no raising, no Mojo runtime. That rules out Mojo's global
variables, so the state is one page at a fixed address, mapped by the library constructor and shared by both
libraries. An all-zero page is a valid state: an unlocked pthread mutex and no socket.
"""

from interface import *
from std.ffi import external_call

comptime STATE = 0x40_4750_0000  # below 2^39, the end of the smallest 64-bit address spaces
comptime STATE_BYTES = 4096
comptime MAGIC = 0x7667_7075_0001

# Word offsets in the state page.
comptime MAGIC_SLOT = 0
comptime MUTEX_SLOT = 1  # 40 bytes on x86-64, 48 on aarch64
comptime SOCKET_SLOT = 9  # file descriptor + 1, so that zero means none
comptime PID_SLOT = 10  # the process that connected; a forked child must not use the connection
comptime PINNED_SLOT = 16  # the first pinned range of host memory (host_memory.mojo)


def at[T: AnyType](address: Int) -> Pointer[T, MutUntrackedOrigin]:
    """Return a reference to a T at a raw address, for C out-parameters."""
    return Pointer[T, MutUntrackedOrigin](unsafe_from_address=address)


def state(slot: Int) -> Pointer[Int, MutUntrackedOrigin]:
    """Return a reference to one word of the state page."""
    return at[Int](STATE + 8 * slot)


def open_state():
    """Map the state page once per process; libraries opened later share it."""
    # PROT_READ|PROT_WRITE; MAP_PRIVATE|MAP_ANONYMOUS|MAP_FIXED_NOREPLACE
    var page = external_call["mmap", Int](STATE, STATE_BYTES, Int32(3), Int32(0x100022), Int32(-1), Int(0))
    if page == STATE:
        state(MAGIC_SLOT)[] = MAGIC


def has_state() -> Bool:
    """Return False if something else is mapped at the fixed address in this process."""
    # msync returns ENOMEM for an unmapped page instead of faulting.
    if external_call["msync", Int32](STATE, STATE_BYTES, Int32(1)) != 0:
        return False
    return state(MAGIC_SLOT)[] == MAGIC


def c_text(text: StaticString) -> Int:
    """Return the address of a string literal as a C string (literals are NUL-terminated)."""
    return Int(text.unsafe_ptr())


def print_error(text: StaticString):
    """Print one line to standard error."""
    _ = external_call["dprintf", Int32](Int32(2), c_text("%s\n"), c_text(text))


def transfer[send: Bool](fd: Int32, address: Int, count: Int) -> Bool:
    """Send or receive exactly `count` bytes; return False if the connection is closed."""
    var done = 0
    while done < count:
        var n: Int
        comptime if send:
            n = external_call["send", Int](fd, address + done, count - done, Int32(0x4000))  # MSG_NOSIGNAL
        else:
            n = external_call["recv", Int](fd, address + done, count - done, Int32(0))
        if n > 0:
            done += n
        elif n == 0 or at[Int32](external_call["__errno_location", Int]())[] != 4:  # EINTR: try again
            return False
    return True


def connect() -> Int32:
    """Connect if necessary. Return a CUDA result code: NO_DEVICE if no virtual GPU was requested."""
    if not has_state():
        return OPERATING_SYSTEM
    if state(PID_SLOT)[] != 0:
        return SUCCESS if state(PID_SLOT)[] == get_pid() else NOT_INITIALIZED
    var name = external_call["getenv", Int](c_text("WORKBOOK_VGPU_SOCKET"))
    if name == 0:
        return NO_DEVICE
    var length = external_call["strlen", Int](name)
    if length == 0 or length > 100:
        return NO_DEVICE
    # struct sockaddr_un with an abstract name, which creates no file: family, a zero byte, the name.
    var address = Array[UInt8, 112](fill=0)
    address[0] = 1  # AF_UNIX
    for i in range(length):
        address[3 + i] = at[UInt8](name + i)[]
    var fd = external_call["socket", Int32](
        Int32(1), Int32(1 | 0o2000000), Int32(0)
    )  # SOCK_STREAM|SOCK_CLOEXEC
    if fd < 0:
        return OPERATING_SYSTEM
    var raw = Int(Pointer(to=address).unsafe_bitcast[UInt8]())
    var rc = external_call["connect", Int32](fd, raw, Int32(3 + length))
    _ = address
    if rc != 0:
        _ = external_call["close", Int32](fd)
        print_error("virtual GPU: the executor process does not answer (did `vgpu exec` end?)")
        return NO_DEVICE
    state(SOCKET_SLOT)[] = Int(fd) + 1
    state(PID_SLOT)[] = get_pid()
    return SUCCESS


def get_pid() -> Int:
    return Int(external_call["getpid", Int32]())


def connect_locked() -> Int32:
    """Run `connect` under the lock, because several threads may initialise at once."""
    if not has_state():
        return OPERATING_SYSTEM
    _ = external_call["pthread_mutex_lock", Int32](STATE + 8 * MUTEX_SLOT)
    var result = connect()
    _ = external_call["pthread_mutex_unlock", Int32](STATE + 8 * MUTEX_SLOT)
    return result


struct Request:
    """One driver call: operation, input buffer, output buffer, up to eleven arguments.

    Words: 0 operation, 1-2 address and length of the input, 3-4 address and length of the output, 5-15 arguments. After
    `call`, words 5-8 are the results and word 4 is the number of output bytes.
    """

    var words: Array[Int, 16]

    def __init__(out self, operation: Int, a: Int = 0, b: Int = 0, c: Int = 0, d: Int = 0):
        self.words = Array[Int, 16](fill=0)
        self.words[0] = operation
        self.words[5] = a
        self.words[6] = b
        self.words[7] = c
        self.words[8] = d

    def input(mut self, address: Int, length: Int):
        self.words[1] = address
        self.words[2] = length

    def output(mut self, address: Int, length: Int):
        self.words[3] = address
        self.words[4] = length

    @no_inline
    def call(mut self) -> Int32:
        """Send the request and receive its answer. Return the CUDA result code."""
        if not has_state() or state(PID_SLOT)[] != get_pid():
            return NOT_INITIALIZED
        var raw = Int(Pointer(to=self.words).unsafe_bitcast[Int]())
        _ = external_call["pthread_mutex_lock", Int32](STATE + 8 * MUTEX_SLOT)
        # The connection may have been lost.
        var result = self.exchange(raw) if state(SOCKET_SLOT)[] != 0 else NOT_INITIALIZED
        _ = external_call["pthread_mutex_unlock", Int32](STATE + 8 * MUTEX_SLOT)
        # The compiler does not see that the answer was written through an address: read it the same way.
        for i in range(4, 9):
            self.words[i] = at[Int](raw + 8 * i)[]
        return result

    def exchange(mut self, raw: Int) -> Int32:
        """Send the sixteen words and the input; receive result code, four results, output length and output.
        """
        var fd = Int32(state(SOCKET_SLOT)[] - 1)
        var answer = Array[Int, 6](fill=0)
        var answer_raw = Int(Pointer(to=answer).unsafe_bitcast[Int]())
        var ok = (
            transfer[send=True](fd, raw, 128)
            and transfer[send=True](fd, at[Int](raw + 8)[], at[Int](raw + 16)[])
            and transfer[send=False](fd, answer_raw, 48)
        )
        var filled = at[Int](answer_raw + 40)[]
        ok = ok and filled <= at[Int](raw + 32)[] and transfer[send=False](fd, at[Int](raw + 24)[], filled)
        for i in range(4):
            at[Int](raw + 40 + 8 * i)[] = at[Int](answer_raw + 8 + 8 * i)[]
        at[Int](raw + 32)[] = filled
        var result = Int32(at[Int](answer_raw)[])
        _ = answer
        if not ok:
            _ = external_call["close", Int32](fd)
            state(SOCKET_SLOT)[] = 0
            print_error("virtual GPU: lost the connection to the executor process")
            return UNKNOWN
        return result

    def result(self, index: Int = 0) -> Int:
        return self.words[5 + index]

    def output_length(self) -> Int:
        """Return the number of output bytes after `call`."""
        return self.words[4]


@no_inline
def send(operation: Int, a: Int = 0, b: Int = 0, c: Int = 0, d: Int = 0) -> Int32:
    """Send a request without input and output; return the result code."""
    var request = Request(operation, a, b, c, d)
    return request.call()


def store_int32_result(var request: Request, address: Int) -> Int32:
    """Send a request and store its first result as a C int."""
    var code = request.call()
    if code == SUCCESS:
        at[Int32](address)[] = Int32(request.result())
    return code


def store_int_result(var request: Request, address: Int) -> Int32:
    """Send a request and store its first result as a 64-bit word (an address, a handle, a size)."""
    var code = request.call()
    if code == SUCCESS:
        at[Int](address)[] = request.result()
    return code


def store_two_results(var request: Request, first: Int, second: Int) -> Int32:
    """Send a request and store its two results as 64-bit words, each unless its address is null."""
    var code = request.call()
    if code == SUCCESS and first != 0:
        at[Int](first)[] = request.result(0)
    if code == SUCCESS and second != 0:
        at[Int](second)[] = request.result(1)
    return code


def unsupported(name: StaticString) -> Int32:
    """Report the name of an unsupported entry point to Python."""
    var request = Request(OP_UNSUPPORTED)
    request.input(c_text(name), name.byte_length())
    _ = request.call()
    return NOT_SUPPORTED
