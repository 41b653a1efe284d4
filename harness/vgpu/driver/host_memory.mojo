"""Pinned host memory: the ranges that the program has pinned, and fills and copies in them.

With unified addressing a pinned host buffer is a legal target of fills and copies, so libcuda.mojo must distinguish
such addresses from device addresses. The ranges are a linked list of nodes of three words (address, bytes, next); a
word of the state page points to the first.
"""

from std.ffi import external_call
from transport import STATE, MUTEX_SLOT, PINNED_SLOT, at, has_state, state


def lock() -> Bool:
    """Lock the ranges; return False if there is no state page, so that nothing can be pinned."""
    return has_state() and external_call["pthread_mutex_lock", Int32](STATE + 8 * MUTEX_SLOT) == 0


def unlock():
    _ = external_call["pthread_mutex_unlock", Int32](STATE + 8 * MUTEX_SLOT)


def add_pinned(address: Int, count: Int):
    """Add a range of pinned host memory."""
    if not lock():
        return
    var node = external_call["calloc", Int](Int(3), Int(8))
    at[Int](node)[] = address
    at[Int](node + 8)[] = count
    at[Int](node + 16)[] = state(PINNED_SLOT)[]
    state(PINNED_SLOT)[] = node
    unlock()


def remove_pinned(address: Int) -> Bool:
    """Remove the pinned range that begins at an address; return False if there is none."""
    if not lock():
        return False
    var link = STATE + 8 * PINNED_SLOT
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


def find_pinned_range(address: Int) -> Tuple[Int, Int]:
    """Return (start, bytes) of the pinned range that contains an address; 0 bytes if there is none."""
    if not lock():
        return (0, 0)
    var pinned = (0, 0)
    var node = state(PINNED_SLOT)[]
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
    """Return whether `count` bytes at an address are in one pinned range."""
    var pinned = find_pinned_range(address)
    return pinned[1] != 0 and address + count <= pinned[0] + pinned[1]


def fill_host(address: Int, value: Int, width: Int, count: Int):
    """Fill host memory with `count` copies of a value of 1, 2 or 4 bytes."""
    for i in range(count):
        if width == 1:
            at[UInt8](address + i)[] = UInt8(value)
        elif width == 2:
            at[UInt16](address + 2 * i)[] = UInt16(value)
        else:
            at[UInt32](address + 4 * i)[] = UInt32(value)


def copy_host(target: Int, source: Int, count: Int):
    """Copy host memory; the ranges may overlap."""
    _ = external_call["memmove", Int](target, source, count)
