"""Pinned host memory: the ranges of this process that the program has pinned, and fills and copies in them.

With unified addressing a pinned host buffer is a legal target of every fill and copy, so libcuda.mojo must tell such an
address from one of the device. The ranges are a linked list of three words each (address, bytes, next) behind one
word of the state page.
"""

from std.ffi import external_call
from transport import STATE, S_MUTEX, S_PINNED, at, state, state_is_ours


def lock() -> Bool:
    """Return False without a state page: nothing was ever pinned."""
    return state_is_ours() and external_call["pthread_mutex_lock", Int32](STATE + 8 * S_MUTEX) == 0


def unlock():
    _ = external_call["pthread_mutex_unlock", Int32](STATE + 8 * S_MUTEX)


def remember_pinned(address: Int, count: Int):
    """Add a range of pinned host memory."""
    if not lock():
        return
    var node = external_call["calloc", Int](Int(3), Int(8))
    at[Int](node)[] = address
    at[Int](node + 8)[] = count
    at[Int](node + 16)[] = state(S_PINNED)[]
    state(S_PINNED)[] = node
    unlock()


def forget_pinned(address: Int) -> Bool:
    """Remove the pinned range that begins here; return False if there is none."""
    if not lock():
        return False
    var link = STATE + 8 * S_PINNED
    while at[Int](link)[] != 0:
        var node = at[Int](link)[]
        if at[Int](node)[] == address:
            at[Int](link)[] = at[Int](node + 16)[]
            unlock()
            external_call["free", NoneType](node)
            return True
        link = node + 16
    unlock()
    return False


def pinned_range(address: Int) -> Tuple[Int, Int]:
    """Return (start, bytes) of the pinned range that holds an address; 0 bytes if there is none."""
    if not lock():
        return (0, 0)
    var pinned = (0, 0)
    var node = state(S_PINNED)[]
    while node != 0:
        var start = at[Int](node)[]
        var count = at[Int](node + 8)[]
        if start <= address and address < start + count:
            pinned = (start, count)
            break
        node = at[Int](node + 16)[]
    unlock()
    return pinned


def is_pinned(address: Int, count: Int) -> Bool:
    """Return whether all these bytes are in one pinned range."""
    var pinned = pinned_range(address)
    return pinned[1] != 0 and address + count <= pinned[0] + pinned[1]


def fill_host(address: Int, value: Int, width: Int, count: Int):
    """Repeat a value of 1, 2 or 4 bytes."""
    for i in range(count):
        if width == 1:
            at[UInt8](address + i)[] = UInt8(value)
        elif width == 2:
            at[UInt16](address + 2 * i)[] = UInt16(value)
        else:
            at[UInt32](address + 4 * i)[] = UInt32(value)


def move_host(target: Int, source: Int, count: Int):
    """Copy host memory, which may overlap."""
    _ = external_call["memmove", Int](target, source, count)
