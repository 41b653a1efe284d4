"""The exponential of the CPU paths, exact where the standard library's is not."""

from std.math import floor, ldexp

comptime LN2_HIGH = 6.93147180369123816490e-01
comptime LN2_LOW = 1.90821492927058770002e-10
"""The natural logarithm of 2 in two parts, so that a whole multiple of the first is exact."""


def exponential(x: Float64) -> Float64:
    """The exponential to the last digits of float64, and NaN of NaN; `exp` has twelve digits, and infinity of NaN.

    x = k ln 2 + r with |r| <= ln 2 / 2, exp(x) = 2^k exp(r), and exp(r) is its series up to r^13.
    """
    if x != x or x > 709.78:
        return x + Float64.MAX  # NaN, or infinity
    if x < -745.2:
        return 0
    var k = floor(x * 1.4426950408889634 + 0.5)
    var r = (x - k * LN2_HIGH) - k * LN2_LOW
    var series = Float64(1)
    for i in range(13):
        series = 1 + r * series / Float64(13 - i)
    # In two steps: 2^k alone may be too small where the result is not.
    var half = Int32(Int(k) // 2)
    return ldexp(ldexp(series, half), Int32(Int(k)) - half)
