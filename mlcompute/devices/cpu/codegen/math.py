"""Functions of float32 registers, written out as instructions: no calls, no branches on the ordinary path.

Each is `name(code, x, lanes)`. All float32 numbers are served: subnormals, infinities, NaN, both zeros. One lane and
many lanes round alike, so a value does not depend on whether it was computed in a vector or in the remainder loop.
Largest errors found among 70 million float32 numbers spread over all bit patterns, in ulp (the distance of
neighbouring floats at the true value):

    exp 1.1    exp2 1.1    expm1 1.6   log 1.0    log2 1.7   log1p 1.5   sigmoid 2.4   softplus 1.8   tanh 2.6
    sinh 1.7   cosh 1.5    asinh 1.8   acosh 2.1  atanh 2.1  erf 3.8     sqrt 0.5      rsqrt 1.5      pow 0.51
    sin 1.6    cos 1.6     tan 3.1     asin 2.4   acos 1.1   atan 2.1

The coefficients are minimax fits on the reduced interval, with those of lower order rounded to float32 first and the
others fitted again.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from mlcompute.devices.cpu.codegen.code import Code, type_suffix, vector, vector_lanes
from mlcompute.devices.cpu.codegen.simd import SimdValue, fma, polynomial, select

_INF, _NAN = math.inf, math.nan
_LOG2_E = 1.0 / math.log(2.0)
#: ln 2 as the float32 nearest to it and the rest.
_LN2, _LN2_REST = 0.693147182464599609375, -1.904654299957764e-9
_EXPONENT = -(1 << 23)  # the bits of a float32 above its fraction
_SQRT_HALF = 0x3F3504F3  # the bits of sqrt(1/2)
_ONE = 0x3F800000  # the bits of 1

# Exponentials -------------------------------------------------------------------------------------------------

#: Added to a number below 2^22, leaves its nearest integer n, half to even, in the lowest bits of the sum. Shifted to
#: the place of the exponent these read n + 2 bias: a power of two once the bits of another power are taken off.
_ROUND = 1.5 * 2.0**23 + 2 * 127
_ROUND_BITS = 0x4B4000FE
#: The same for one bias: the bits of 2^n.
_ROUND_TO_POWER = 1.5 * 2.0**23 + 127
#: (e^r - 1 - r) / r²  on |r| <= ln 2 / 2.
_EXP = (0.49999997, 0.16666546, 0.041667443, 0.008366253, 0.0013869948)


def _exp_minus_one(r: SimdValue) -> SimdValue:
    """e^r - 1  for |r| <= ln 2 / 2."""
    return fma(r * r, polynomial(r, _EXP), r)


def _scaled(mantissa: SimdValue, rounded: SimdValue, exponent: int = 0, shrinks: bool = False) -> SimdValue:
    """mantissa 2^(n + exponent)  for |n| <= 160, rounded once. `rounded` is n + _ROUND; `shrinks` says n <= 0."""
    if vector_lanes() == 16:  # AVX-512 has an instruction for it
        integer = rounded.bits() - (_ROUND_BITS - exponent)
        function = f"{mantissa.type} @llvm.ldexp.{type_suffix(mantissa.type)}.{type_suffix(integer.type)}"
        mantissa.code.declare(f"{function}({mantissa.type}, {integer.type})")
        return mantissa.let(f"call {function}({mantissa.type} {mantissa.name}, {integer.type} {integer.name})")
    # Two factors: neither leaves the normal numbers, and only the second product can be inexact.
    second = rounded.like(2.0**-64)
    if not shrinks:
        second = select(rounded < _ROUND, second, 2.0**64)
    first = (rounded.bits() << 23) - (second.bits() - (exponent << 23))
    return mantissa * first.from_bits() * second


def _exp_within(x: SimdValue, exponent: int = 0, shrinks: bool = False) -> SimdValue:
    """e^x 2^exponent  for |x| <= 110: no bounds are checked."""
    rounded = fma(x, _LOG2_E, _ROUND)
    n = rounded - _ROUND
    r = fma(n, -_LN2_REST, fma(n, -_LN2, x))
    return _scaled(_exp_minus_one(r) + 1.0, rounded, exponent, shrinks)


def _exp_of_minus_abs(x: SimdValue) -> SimdValue:
    """e^-|x|"""
    return _exp_within((-x.abs()).at_least(-104.0), shrinks=True)


def _exp(x: SimdValue) -> SimdValue:
    # Beyond these bounds the result is 0 or infinity, as it is at them.
    return _exp_within(x.at_least(-104.0).at_most(89.0))


def _exp2(x: SimdValue) -> SimdValue:
    x = x.at_least(-151.0).at_most(129.0)
    rounded = x + _ROUND
    r = (x - (rounded - _ROUND)) * math.log(2.0)
    return _scaled(_exp_minus_one(r) + 1.0, rounded)


def _expm1(x: SimdValue) -> SimdValue:
    """2^n (e^r - 1) + (2^n - 1)"""
    bounded = x.at_least(-20.0).at_most(89.0)
    rounded = fma(bounded, _LOG2_E, _ROUND_TO_POWER)
    n = rounded - _ROUND_TO_POWER
    r = fma(n, -_LN2_REST, fma(n, -_LN2, bounded))
    # Half of everything, since 2^128 is no float32.
    half_power = ((rounded.bits() << 23) - (1 << 23)).from_bits()
    half = fma(half_power, _exp_minus_one(r), half_power - 0.5)
    # Halves of subnormals lose a bit, and zero its sign; so small a number is its own result.
    return select(x.abs() < 2.0**-60, x, half + half)


def _sigmoid(x: SimdValue) -> SimdValue:
    """1 / (1 + e^-x), as e^x / (1 + e^x) for negative x: exact down to the subnormals."""
    e = _exp_of_minus_abs(x)
    return select(x < 0.0, e, 1.0) / (e + 1.0)


def _tanh(x: SimdValue) -> SimdValue:
    """(e^2x - 1) / (e^2x + 1)"""
    twice = x.abs().at_most(10.0)
    twice = twice + twice
    rounded = fma(twice, _LOG2_E, _ROUND_TO_POWER)
    # What ln 2 misses here grows with n, and what it does to the result shrinks faster.
    r = fma(rounded - _ROUND_TO_POWER, -_LN2, twice)
    power = (rounded.bits() << 23).from_bits()
    e = fma(power, _exp_minus_one(r), power - 1.0)
    return (e / (e + 2.0)).with_sign_of(x)


def _sinh(x: SimdValue) -> SimdValue:
    """(e^x - e^-x) / 2"""
    a = x.abs()
    half = _exp_within(a.at_most(91.0), exponent=-1)
    square = a * a
    # x + x³/6 + ... where the difference would cancel.
    small = fma(a * square, polynomial(square, (0.16666667, 0.0083333105, 0.00019842896, 2.7822132e-06)), a)
    return select(a < 1.0, small, half - 0.25 / half).with_sign_of(x)


def _cosh(x: SimdValue) -> SimdValue:
    """(e^x + e^-x) / 2"""
    half = _exp_within(x.abs().at_most(91.0), exponent=-1)
    return half + 0.25 / half


# Logarithms ---------------------------------------------------------------------------------------------------

#: (log(1 + f) - f) / f²  on sqrt(1/2) <= 1 + f <= sqrt(2).
_LOG = (-0.5, 0.3333333, -0.2500082, 0.20001242, -0.16623409, 0.14201581, -0.13159613, 0.12762198, -0.07636396)


def _log_near_one(f: SimdValue) -> SimdValue:
    """log(1 + f)  for sqrt(1/2) <= 1 + f <= sqrt(2)."""
    return fma(f * f, polynomial(f, _LOG), f)


def _to_float(x: SimdValue) -> SimdValue:
    return x.let(f"sitofp {x.type} {x.name} to {vector('float', x.lanes)}", "float")


def _exponent_and_fraction(x: SimdValue) -> tuple[SimdValue, SimdValue]:
    """e and f of x = 2^e (1 + f), sqrt(1/2) <= 1 + f < sqrt(2). Arbitrary unless x is positive and finite."""
    tiny = x < 2.0**-126  # subnormal: the exponent stands in the fraction
    bits = select(tiny, x * 2.0**24, x).bits()
    offset = bits - _SQRT_HALF
    exponent = _to_float(offset >> 23) + select(tiny, -24.0, x.like(0.0))
    return exponent, (bits - (offset & _EXPONENT)).from_bits() - 1.0


def _with_poles(x: SimdValue, pole: float, logarithm: SimdValue) -> SimdValue:
    """A logarithm whose argument is zero at x = pole: -inf there, NaN below, and inf and NaN unchanged."""
    ordinary = select(x < _INF, logarithm, x)
    return select(x <= pole, select(x < pole, _NAN, x.like(-_INF)), ordinary)


def _log(x: SimdValue) -> SimdValue:
    exponent, f = _exponent_and_fraction(x)
    return _with_poles(x, 0.0, fma(exponent, _LN2, _log_near_one(f)))


def _log2(x: SimdValue) -> SimdValue:
    exponent, f = _exponent_and_fraction(x)
    return _with_poles(x, 0.0, fma(_log_near_one(f), _LOG2_E, exponent))


def _log1p_within(x: SimdValue, more: SimdValue | float = 0.0) -> SimdValue:
    """log(1 + x) + more ln 2  for -1 < x < 2^126: 1 + x = 2^e (1 + f) gives e, and x gives f without cancellation."""
    offset = (x + 1.0).bits() - _SQRT_HALF
    inverse = (_ONE - (offset & _EXPONENT)).from_bits()  # 2^-e
    f = fma(x, inverse, inverse - 1.0)
    return fma(_to_float(offset >> 23) + more, _LN2, _log_near_one(f))


def _log1p(x: SimdValue) -> SimdValue:
    huge = x > 2.0**100
    logarithm = _log1p_within(select(huge, x * 0.25, x), select(huge, 2.0, x.like(0.0)))
    return select(x.equals(0.0), x, _with_poles(x, -1.0, logarithm))


def _softplus(x: SimdValue) -> SimdValue:
    """log(1 + e^x) = max(x, 0) + log(1 + e^-|x|)"""
    return x.at_least(0.0) + _log1p_within(_exp_of_minus_abs(x))


def _asinh(x: SimdValue) -> SimdValue:
    """log(x + sqrt(x² + 1))"""
    a = x.abs()
    square = a * a
    # For large x the square overflows and the logarithm is that of 2 x.
    large = a > 2.0**40
    argument = select(large, a, a + square / ((square + 1.0).sqrt() + 1.0))
    return (_log1p(argument) + select(large, _LN2, x.like(0.0))).with_sign_of(x)


def _acosh(x: SimdValue) -> SimdValue:
    """log(x + sqrt(x² - 1)), through y = x - 1"""
    large = x > 2.0**40
    y = x - 1.0
    argument = select(large, x, y + (y * (y + 2.0)).sqrt())
    return select(x < 1.0, _NAN, _log1p(argument) + select(large, _LN2, x.like(0.0)))


def _atanh(x: SimdValue) -> SimdValue:
    """log((1 + x) / (1 - x)) / 2"""
    a = x.abs()
    return (0.5 * _log1p((a + a) / (1.0 - a))).with_sign_of(x)


# Error function -----------------------------------------------------------------------------------------------


def _erf(x: SimdValue) -> SimdValue:
    """2 h / (1 + h²)  where h = x p(x²) / q(x²).

    Approximating h = erf / (1 + sqrt(1 - erf²)) instead of erf itself takes half the degree, and where erf nears 1
    errors of h, p and q no longer reach the result.
    """
    a = x.abs().at_most(3.93)  # erf is 1 from there
    square = a * a
    # Twice the numerator, and both divided by p(0).
    n = fma(a * square, polynomial(square, (0.2635494, 0.02860769, 0.0022515988)), a)
    d = polynomial(square, (0.8862269, 0.2468798, 0.042941324, 0.0053603533, 8.766454e-05))
    return (n * d / fma(n, n * 0.25, d * d)).at_most(1.0).with_sign_of(x)


# Trigonometry -------------------------------------------------------------------------------------------------

#: π/2 as a sum of float32 numbers.
_HALF_PI = (1.57079637050628662109375, -4.37113900018624283e-8, -1.71512449944e-15)
_ROUND_ONLY = 1.5 * 2.0**23
#: Up to here a quarter turn times its count, in three parts, leaves a remainder good to the last bits.
_FAR = 2.0**17
_SIGN = -(1 << 31)


def _sin_cos(x: SimdValue) -> tuple[SimdValue, SimdValue]:
    """Both; LLVM drops what the one that is not used needs alone."""
    a = x.abs()
    rounded = fma(a, 2.0 / math.pi, _ROUND_ONLY)
    n = rounded - _ROUND_ONLY
    r = a
    for part in _HALF_PI:
        r = fma(n, -part, r)
    square = r * r
    sine = fma(r * square, polynomial(square, (-0.16666654, 0.008332093, -0.00019505147)), r)
    cosine = polynomial(square, (1.0, -0.5, 0.04166664, -0.001388713, 2.4412086e-05))
    quarter = rounded.bits()
    odd = (quarter & 1).differs(0)
    sine, cosine = select(odd, cosine, sine), select(odd, sine, cosine)
    sine = (sine.bits() ^ (((quarter << 30) ^ x.bits()) & _SIGN)).from_bits()
    cosine = (cosine.bits() ^ (((quarter + 1) << 30) & _SIGN)).from_bits()
    far = a > _FAR
    return _by_library(x, sine, far, "sin"), _by_library(x, cosine, far, "cos")


def _by_library(x: SimdValue, result: SimdValue, where: SimdValue, name: str) -> SimdValue:
    """`result`, with the C library's values in the lanes of a mask; a jump over all of it when the mask is empty."""
    code, type_ = x.code, x.type
    slot = code.variable(type_, result.name)
    if x.lanes == 1:
        with code.when(where.name):
            code.set(type_, slot, x.intrinsic(name).name)
    else:
        anywhere = f"i1 @llvm.vector.reduce.or.v{x.lanes}i1({where.type}"
        code.declare(f"{anywhere})")
        with code.when(code.let(f"call {anywhere} {where.name})")):
            values = code.variable(type_, x.name)
            with code.loop(0, x.lanes) as lane:
                before = code.get(type_, values)
                value = code.intrinsic(name, "float", code.let(f"extractelement {type_} {before}, i64 {lane}"))
                code.set(type_, values, code.let(f"insertelement {type_} {before}, float {value}, i64 {lane}"))
            code.set(
                type_, slot, select(where, SimdValue(code, code.get(type_, values), "float", x.lanes), result).name
            )
    return SimdValue(code, code.get(type_, slot), "float", x.lanes)


def _sin(x: SimdValue) -> SimdValue:
    return _sin_cos(x)[0]


def _cos(x: SimdValue) -> SimdValue:
    return _sin_cos(x)[1]


def _tan(x: SimdValue) -> SimdValue:
    sine, cosine = _sin_cos(x)
    return sine / cosine


#: (asin(s) - s) / s³ in powers of s²  on |s| <= 1/2.
_ASIN = (0.16666752, 0.07495307, 0.04546964, 0.024181498, 0.04216512)


def _asin_parts(x: SimdValue) -> tuple[SimdValue, SimdValue]:
    """Whether |x| > 1/2, and asin(|x|), or there asin(sqrt((1 - |x|) / 2)), half the angle to 1."""
    a = x.abs()
    near_one = a > 0.5
    square = select(near_one, fma(a, -0.5, 0.5), a * a)
    s = select(near_one, square.sqrt(), a)
    return near_one, fma(s * square, polynomial(square, _ASIN), s)


def _asin(x: SimdValue) -> SimdValue:
    near_one, angle = _asin_parts(x)
    return select(near_one, _HALF_PI[0] - fma(angle, 2.0, -_HALF_PI[1]), angle).with_sign_of(x)


def _acos(x: SimdValue) -> SimdValue:
    near_one, angle = _asin_parts(x)
    twice = angle + angle
    outer = select(x < 0.0, 2 * _HALF_PI[0] - (twice - 2 * _HALF_PI[1]), twice)
    return select(near_one, outer, _HALF_PI[0] - (angle.with_sign_of(x) - _HALF_PI[1]))


def _atan(x: SimdValue) -> SimdValue:
    """base + atan(t), |t| <= tan(π/8): t is x, (x - 1) / (x + 1) from π/4, or -1/x from π/2."""
    a = x.abs()
    middle, large = a > 0.41421356, a > 2.4142137
    t = select(large, -1.0, select(middle, a - 1.0, a)) / select(large, a, select(middle, a + 1.0, 1.0))
    square = t * t
    angle = fma(t * square, polynomial(square, (-0.33333316, 0.19998528, -0.14244391, 0.10599166, -0.06090037)), t)
    quarters = select(large, 2.0, select(middle, 1.0, x.like(0.0)))
    angle = fma(quarters, 0.5 * _HALF_PI[0], fma(quarters, 0.5 * _HALF_PI[1], angle))
    return angle.with_sign_of(x)


# Roots and powers ---------------------------------------------------------------------------------------------


def _sqrt(x: SimdValue) -> SimdValue:
    return x.sqrt()


def _rsqrt(x: SimdValue) -> SimdValue:
    """1 / sqrt(x), both correctly rounded: what NumPy gives, bitwise"""
    return 1.0 / x.sqrt()


#: log2((1 + s) / (1 - s)) / s in powers of s²  on sqrt(1/2) <= (1 + s) / (1 - s) <= sqrt(2).
_LOG2 = (2.88539008177785, 0.961796694113325, 0.5770779423708566, 0.41220925170574757, 0.3199057264660867,
         0.2828997152729695)  # fmt: skip
#: 2^r on |r| <= 1/2.
_EXP2 = (0.9999999999616815, 0.693147180728447, 0.2402265119815887, 0.05550410353449673, 0.00961802725351768,
         0.0013333922561280112, 0.0001546929118668644, 1.5201922248720531e-05)  # fmt: skip
_ROUND_DOUBLE = 1.5 * 2.0**52 + 1023
_SQRT_HALF_DOUBLE = 0x3FE6A09E667F3BCD


def _positive_power(x: SimdValue, y: SimdValue) -> SimdValue:
    """x^y = 2^(y log2 x)  for x >= 0, in double: y log2 x has up to 7 bits before the point."""
    double = vector("double", x.lanes)
    wide = x.let(f"fpext {x.type} {x.name} to {double}", "double")
    bits = wide.bits()
    offset = bits - _SQRT_HALF_DOUBLE
    m = (bits - (offset & -(1 << 52))).from_bits()
    s = (m - 1.0) / (m + 1.0)
    narrow = offset.let(f"trunc {offset.type} {(offset >> 52).name} to {vector('i32', x.lanes)}", "i32")
    exponent = narrow.let(f"sitofp {narrow.type} {narrow.name} to {double}", "double")
    logarithm = fma(s, polynomial(s * s, _LOG2), exponent)
    logarithm = select(wide.equals(0.0), -_INF, select(wide.equals(_INF), _INF, logarithm))
    product = y.let(f"fpext {y.type} {y.name} to {double}", "double") * logarithm
    # 1^inf is 1. Beyond the bounds the result is 0 or infinity in float32.
    product = select(logarithm.equals(0.0), 0.0, product).at_least(-160.0).at_most(160.0)
    rounded = product + _ROUND_DOUBLE
    power = polynomial(product - (rounded - _ROUND_DOUBLE), _EXP2) * (rounded.bits() << 52).from_bits()
    return power.let(f"fptrunc {power.type} {power.name} to {x.type}", "float")


def _pow(x: SimdValue, y: SimdValue) -> SimdValue:
    """x^y with C's rules: x^0 = 1^y = 1 even beside NaN; a negative x takes integers y only."""
    half = y * 0.5
    integer = y.rounded().equals(y)
    odd = integer & half.rounded().differs(half)
    power = _positive_power(x.abs(), y)
    power = select(odd, power.with_sign_of(x), power)
    undefined = x.is_nan() | y.is_nan() | ((x < 0.0) & (x > -_INF) & ~integer)
    return select(x.equals(1.0) | y.equals(0.0), 1.0, select(undefined, _NAN, power))


# As functions of registers --------------------------------------------------------------------------------------

Function = Callable[[Code, str, int], str]


def _function(formula: Callable[[SimdValue], SimdValue]) -> Function:
    def call(code: Code, x: str, lanes: int) -> str:
        return formula(SimdValue(code, x, "float", lanes)).name

    call.__name__, call.__doc__ = formula.__name__[1:], formula.__doc__
    return call


exp, exp2, expm1, sigmoid, tanh, sinh, cosh = map(_function, (_exp, _exp2, _expm1, _sigmoid, _tanh, _sinh, _cosh))
log, log2, log1p, softplus, erf = map(_function, (_log, _log2, _log1p, _softplus, _erf))
asinh, acosh, atanh = map(_function, (_asinh, _acosh, _atanh))
sin, cos, tan = map(_function, (_sin, _cos, _tan))
asin, acos, atan = map(_function, (_asin, _acos, _atan))
sqrt, rsqrt = map(_function, (_sqrt, _rsqrt))


def pow(code: Code, x: str, y: str, lanes: int) -> str:
    """x^y"""
    return _pow(SimdValue(code, x, "float", lanes), SimdValue(code, y, "float", lanes)).name
