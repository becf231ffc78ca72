"""Special functions: gamma and zeta, error functions, Bessel and Airy functions, orthogonal polynomials.

Chebyshev series and rational approximations follow Cephes (Moshier, netlib.org/cephes), as ATen does; all branches are
evaluated and the right one is selected. Half types are computed in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torch_tpu.lowering import coefficients as c
from torch_tpu.lowering.pointwise import equals, is_nan, polynomial
from torch_tpu.lowering.registry import Promotion, lower
from torch_tpu.stablehlo import Value
from torch_tpu.stablehlo import ops as hlo

Coefficients = tuple[float, ...]
FLOAT = Promotion.INT_TO_FLOAT


def chebyshev(x: Value, coefficients: Coefficients) -> Value:
    """Clenshaw's sum of a Chebyshev series in ``x / 2``, constant term last and halved (Cephes ``chbevl``).

    float32 leaves out the leading terms that it cannot see.
    """
    if x.dtype == torch.float32:
        first = next(i for i, k in enumerate(coefficients) if abs(k) > 1e-10)
        coefficients = coefficients[first:]
    before = last = hlo.full_like(x, 0)
    current = hlo.full_like(x, coefficients[0])
    for k in coefficients[1:]:
        before, last = last, current
        current = x * last - before + k
    return 0.5 * (current - before)


def choose(*cases: tuple[Value, Value | float], otherwise: Value) -> Value:
    """The value of the first case that holds."""
    result = otherwise
    for condition, value in reversed(cases):
        result = hlo.select(condition, value if isinstance(value, Value) else hlo.full_like(otherwise, value), result)
    return result


def _one(x: Value) -> Value:
    return hlo.full_like(x, 1)


# ---- gamma and zeta -------------------------------------------------------------------------------------------------
@lower("lgamma", promote=FLOAT)
def lgamma(x: Value) -> Value:
    pole = hlo.and_(x <= 0.0, equals(x, hlo.floor(x)))
    endless = hlo.or_(pole, equals(hlo.abs_(x), math.inf))
    return choose((endless, math.inf), (equals(x, 1.0) | equals(x, 2.0), 0.0), otherwise=hlo.lgamma(x))


@lower("digamma", promote=FLOAT)
def digamma(x: Value) -> Value:
    """The logarithmic derivative of gamma: minus infinity of x's sign at 0, NaN at the other poles."""
    pole = hlo.and_(x < 0.0, equals(x, hlo.floor(x)))
    return choose((equals(x, 0.0), -1.0 / x), (pole, math.nan), otherwise=hlo.digamma(x))


#: (2k)! / B_2k, k = 1..12: the denominators of the Euler-Maclaurin sum
_EULER_MACLAURIN = tuple(
    math.factorial(2 * k) / (numerator / denominator)
    for k, (numerator, denominator) in enumerate(
        [(1, 6), (-1, 30), (1, 42), (-1, 30), (5, 66), (-691, 2730), (7, 6), (-3617, 510), (43867, 798), (-174611, 330),
         (854513, 138), (-236364091, 2730)], 1,
    )
)  # fmt: skip


@lower("special_zeta", "special_zeta.self_scalar", "special_zeta.other_scalar", promote=FLOAT)
def zeta(x: Value, q: Value) -> Value:
    """Hurwitz zeta, the sum of (k + q)^-x: terms up to k + q > 9, then the Euler-Maclaurin formula, as Cephes."""
    divergent = hlo.and_(q <= 0.0, equals(q, hlo.floor(q)))
    start = choose((divergent, 1.0), otherwise=q)

    def short(a: Value, k: Value) -> Value:
        return hlo.or_(a <= 9.0, hlo.broadcast_to(k < 9, a.shape))

    def unfinished(x: Value, a: Value, b: Value, total: Value, k: Value) -> Value:
        return hlo.reduce_one(short(a, k), False, range(a.ndim), hlo.or_)

    def step(x: Value, a: Value, b: Value, total: Value, k: Value) -> list[Value]:
        more = short(a, k)
        following = a + 1.0
        term = hlo.power(following, -x)
        return [
            x, hlo.select(more, following, a), hlo.select(more, term, b), hlo.select(more, total + term, total), k + 1,
        ]  # fmt: skip

    first = hlo.power(start, -x)
    _, w, b, total, _ = hlo.while_([x, start, first, first, hlo.constant(0, torch.int32)], unfinished, step)
    tail, factor = b * w / (x - 1.0) - 0.5 * b, b
    for i, denominator in enumerate(_EULER_MACLAURIN):
        factor = factor * (x + 2.0 * i) / w
        tail = tail + factor / denominator
        factor = factor * (x + (2.0 * i + 1.0)) / w
    total = hlo.select(equals(b, 0.0), total, total + tail)
    broken = hlo.and_(q <= 0.0, hlo.compare(x, hlo.floor(x), "NE"))
    return choose(
        (equals(x, 1.0), math.inf), (x < 1.0, math.nan), (divergent, math.inf), (broken, math.nan),
        (equals(q, math.inf), math.nan), otherwise=total,
    )  # fmt: skip


def _trigamma(x: Value) -> Value:
    """By reflection to x > 1/2, six steps of recurrence and the asymptotic series, as ATen's ``trigamma``."""
    reflected = x < 0.5
    y = hlo.select(reflected, 1.0 - x, x)
    total = hlo.full_like(x, 0)
    for _ in range(6):
        total = total + 1.0 / (y * y)
        y = y + 1.0
    ixx = 1.0 / (y * y)
    series = (
        (1.0 / 6 - ixx * (1.0 / 30 - ixx * (1.0 / 42)))
        if x.dtype == torch.float32
        else (1.0 / 6 - ixx * (1.0 / 30 - ixx * (1.0 / 42 - ixx * (1.0 / 30))))
    )
    total = total + (1.0 + 1.0 / (2.0 * y) + ixx * series) / y
    sine = hlo.sine(x * math.pi)
    return hlo.select(reflected, math.pi**2 / (sine * sine) - total, total)


@lower("polygamma", promote=FLOAT)
def polygamma(n: int, x: Value) -> Value:
    """Derivative ``n`` of digamma."""
    if n == 0:
        return digamma(x)
    if n == 1:
        return _trigamma(x)
    order = hlo.full_like(x, n + 1)
    return zeta(order, x) * ((1.0 if n % 2 else -1.0) * math.gamma(n + 1.0))


def _log1p_minus(u: Value) -> Value:
    """log(1 + u) - u, by its series near 0."""
    series = polynomial(u, [(-1) ** (k + 1) / k for k in range(24, 1, -1)]) * u * u
    return hlo.select(hlo.abs_(u) < 0.25, series, hlo.log_plus_one(u) - u)


def _igamma_factor(a: Value, x: Value) -> Value:
    """x^a e^-x / gamma(a), for large ``a`` by Stirling's series so that the large terms cancel before they round."""
    direct = hlo.exponential(a * hlo.log(x) - x - hlo.lgamma(a))
    r = 1.0 / (a * a)
    stirling = polynomial(r, [1 / 1188, -1 / 1680, 1 / 1260, -1 / 360, 1 / 12]) / a
    large = hlo.sqrt(a / (2 * math.pi)) * hlo.exponential(a * _log1p_minus((x - a) / a) - stirling)
    return hlo.select(a > 8.0, large, direct)


def _igamma_series(a: Value, x: Value, wanted: Value) -> Value:
    """1/a + x/(a (a+1)) + x^2/(a (a+1) (a+2)) + ..., times a."""
    epsilon = torch.finfo(a.dtype).eps

    def unfinished(term: Value, total: Value, r: Value, x: Value, k: Value) -> Value:
        more = hlo.compare(hlo.abs_(term), hlo.abs_(total) * epsilon, "GT")
        return hlo.and_(hlo.reduce_one(more, False, range(x.ndim), hlo.or_), k < 2000)

    def step(term: Value, total: Value, r: Value, x: Value, k: Value) -> list[Value]:
        r = r + 1.0
        term = term * x / r
        return [term, total + term, r, x, k + 1]

    start = hlo.select(wanted, _one(a), hlo.full_like(a, 0))
    return hlo.while_([start, start, a, x, hlo.constant(0, torch.int32)], unfinished, step)[1]


def _igammac_fraction(a: Value, x: Value, wanted: Value) -> Value:
    """The continued fraction of the upper incomplete gamma function (Cephes ``igamc``), without its factor."""
    epsilon, big = torch.finfo(a.dtype).eps, 2.0**23 if a.dtype == torch.float32 else 2.0**52
    y, z = 1.0 - a, x + 2.0 - a
    p2, q2, p1, q1 = _one(a), x, x + 1.0, z * x
    answer = p1 / q1
    moving = hlo.select(wanted, _one(a), hlo.full_like(a, 0))

    def unfinished(*carry: Value) -> Value:
        return hlo.and_(hlo.reduce_one(carry[-2] > epsilon, False, range(carry[0].ndim), hlo.or_), carry[-1] < 2000)

    def step(
        y: Value, z: Value, p2: Value, q2: Value, p1: Value, q1: Value, answer: Value, change: Value, k: Value
    ) -> list[Value]:
        y, z, k = y + 1.0, z + 2.0, k + 1
        yc = y * hlo.broadcast_to(hlo.convert(k, y.dtype), y.shape)
        p, q = p1 * z - p2 * yc, q1 * z - q2 * yc
        ratio = p / hlo.select(equals(q, 0.0), _one(q), q)
        live = hlo.and_(change > epsilon, hlo.compare(q, 0.0, "NE"))
        change = hlo.select(change > epsilon, hlo.select(live, hlo.abs_((answer - ratio) / ratio), _one(q)), change)
        answer = hlo.select(live, ratio, answer)
        shrink = hlo.select(hlo.abs_(p) > big, hlo.full_like(p, 1 / big), _one(p))
        return [y, z, p1 * shrink, q1 * shrink, p * shrink, q * shrink, answer, change, k]

    carries = [y, z, p2, q2, p1, q1, answer, moving, hlo.constant(0, torch.int32)]
    return hlo.while_(carries, unfinished, step)[6]


def _igamma_of_large(a: Value, x: Value, upper: bool) -> Value:
    """The leading terms of Temme's uniform expansion for large ``a``: nearly a normal distribution function."""
    u = (x - a) / a
    square = -2.0 * _log1p_minus(u)
    eta = hlo.sqrt(square)
    eta = hlo.select(u < 0.0, -eta, eta)
    near = hlo.abs_(u) < 1e-3
    correction = hlo.select(near, hlo.full_like(u, -1.0 / 3), 1.0 / u - 1.0 / eta)
    root = hlo.sqrt(a)
    rest = correction * hlo.exponential(a * square * -0.5) / (root * math.sqrt(2 * math.pi))
    tail = 0.5 * hlo.erfc((eta if upper else -eta) * root * math.sqrt(0.5))
    return tail + rest if upper else tail - rest


#: From here on the series would take too long.
_LARGE = 1e6


def _igamma(a: Value, x: Value, upper: bool) -> Value:
    """Regularised incomplete gamma function: the series below x = max(1, a), the continued fraction above."""
    by_fraction = hlo.and_(x > 1.0, x > a)
    large = a > _LARGE
    none = hlo.and_(hlo.and_(a > 0.0, a < 1e-36), x > 0.0)  # as 0: gamma(a) overflows float32
    far = hlo.and_(x > 2e3, x * 0.1 > a)  # as infinite
    regular = hlo.and_(hlo.and_(a > 0.0, x > 0.0), hlo.and_(hlo.is_finite(a), hlo.is_finite(x)))
    regular = hlo.and_(regular, hlo.not_(large | none | far))
    a_, x_ = hlo.select(regular, a, _one(a)), hlo.select(regular, x, _one(x))
    factor = _igamma_factor(a_, x_)
    low = factor * _igamma_series(a_, x_, hlo.and_(regular, hlo.not_(by_fraction))) / a_
    high = factor * _igammac_fraction(a_, x_, hlo.and_(regular, by_fraction))
    value = hlo.select(by_fraction, high if upper else 1.0 - high, 1.0 - low if upper else low)
    zero, one = (1.0, 0.0) if upper else (0.0, 1.0)  # the limits at x = 0 and x = inf
    infinite = equals(a, math.inf)
    return choose(
        (hlo.or_(x < 0.0, a < 0.0), math.nan),
        (equals(a, 0.0), hlo.select(x > 0.0, hlo.full_like(x, one), hlo.full_like(x, math.nan))),
        (equals(x, 0.0), zero),
        (none, one),
        (infinite, hlo.select(equals(x, math.inf), hlo.full_like(x, math.nan), hlo.full_like(x, zero))),
        (equals(x, math.inf), one),
        (hlo.or_(is_nan(a), is_nan(x)), math.nan),
        (far, one),
        (large, _igamma_of_large(a, x, upper)),
        otherwise=value,
    )


lower("igamma", promote=FLOAT)(lambda a, x: _igamma(a, x, upper=False))
lower("igammac", promote=FLOAT)(lambda a, x: _igamma(a, x, upper=True))


# ---- error functions and logarithms ---------------------------------------------------------------------------------
@lower("special_entr", promote=FLOAT)
def entr(x: Value) -> Value:
    """-x log(x), 0 at 0."""
    return choose(
        (is_nan(x), x), (x > 0.0, -x * hlo.log(x)), (equals(x, 0.0), 0.0), otherwise=hlo.full_like(x, -math.inf)
    )


def _times_log(log: Callable[[Value], Value]) -> Callable[[Value, Value], Value]:
    def rule(x: Value, y: Value) -> Value:
        return choose((is_nan(y), y), (equals(x, 0.0), 0.0), otherwise=x * log(y))

    return rule


lower("xlogy.Tensor", "xlogy.Scalar_Self", "xlogy.Scalar_Other", promote=FLOAT)(_times_log(hlo.log))
lower("special_xlog1py", "special_xlog1py.self_scalar", "special_xlog1py.other_scalar", promote=FLOAT)(
    _times_log(hlo.log_plus_one)
)


@lower("special_erfcx", promote=FLOAT)
def erfcx(x: Value) -> Value:
    """The scaled complementary error function exp(x^2) erfc(x).

    By a Chebyshev series of (1 + 2x) erfcx(x) in (x - k) / (x + k), Shepherd and Laframboise 1981.
    """
    size = hlo.abs_(x)
    t = choose((size > 1e30, 1.0), otherwise=(size - 3.75) / (size + 3.75))
    right = choose(
        (size > 1e30, math.sqrt(1 / math.pi) / size), otherwise=chebyshev(2.0 * t, c.ERFCX) / (1.0 + 2.0 * size)
    )
    return hlo.select(x < 0.0, 2.0 * hlo.exponential(x * x) - right, right)


@lower("special_log_ndtr", promote=FLOAT)
def log_ndtr(x: Value) -> Value:
    """The logarithm of the normal distribution function."""
    t = x * math.sqrt(0.5)
    below = hlo.log(erfcx(-hlo.minimum(t, 0.0)) * 0.5) - t * t
    return hlo.select(x < -1.0, below, hlo.log_plus_one(hlo.erfc(t) * -0.5))


@lower("special_ndtri", promote=FLOAT)
def ndtri(p: Value) -> Value:
    """The normal quantile function (Cephes ``ndtri``)."""
    edge = math.exp(-2)
    upper = p > 1.0 - edge
    y = hlo.select(upper, 1.0 - p, p)
    middle = y - 0.5
    square = middle * middle
    inner = middle + middle * square * polynomial(square, c.NDTRI_P0) / polynomial(square, c.NDTRI_Q0)
    x = hlo.sqrt(-2.0 * hlo.log(y))
    z = 1.0 / x
    near = z * polynomial(z, c.NDTRI_P1) / polynomial(z, c.NDTRI_Q1)
    far = z * polynomial(z, c.NDTRI_P2) / polynomial(z, c.NDTRI_Q2)
    tail = x - hlo.log(x) / x - hlo.select(x < 8.0, near, far)
    return choose(
        (equals(p, 0.0), -math.inf),
        (equals(p, 1.0), math.inf),
        (hlo.or_(p < 0.0, p > 1.0), math.nan),
        (y > edge, inner * math.sqrt(2 * math.pi)),
        otherwise=hlo.select(upper, tail, -tail),
    )


# ---- modified Bessel functions --------------------------------------------------------------------------------------
def _i0e(x: Value) -> Value:
    size = hlo.abs_(x)
    inner = chebyshev(size / 2.0 - 2.0, c.I0_A)
    return hlo.select(size <= 8.0, inner, chebyshev(32.0 / size - 2.0, c.I0_B) / hlo.sqrt(size))


def _i1e(x: Value) -> Value:
    size = hlo.abs_(x)
    inner = chebyshev(size / 2.0 - 2.0, c.I1_A) * size
    value = hlo.select(size <= 8.0, inner, chebyshev(32.0 / size - 2.0, c.I1_B) / hlo.sqrt(size))
    return hlo.select(x < 0.0, -value, value)


def _i0(x: Value) -> Value:
    return hlo.exponential(hlo.abs_(x)) * _i0e(x)


def _i1(x: Value) -> Value:
    return hlo.exponential(hlo.abs_(x)) * _i1e(x)


def _log_half(x: Value) -> Value:
    """log(x / 2); half of the least normal number would count as zero."""
    return hlo.select(x < 1e-30, hlo.log(x) - math.log(2), hlo.log(0.5 * x))


def _k0(x: Value, scaled: bool) -> Value:
    """K0, or exp(x) K0."""
    inner = chebyshev(x * x - 2.0, c.K0_A) - _log_half(x) * _i0(x)
    return _k(x, inner, chebyshev(8.0 / x - 2.0, c.K0_B), scaled)


def _k1(x: Value, scaled: bool) -> Value:
    inner = _log_half(x) * _i1(x) + chebyshev(x * x - 2.0, c.K1_A) / x
    return _k(x, inner, chebyshev(8.0 / x - 2.0, c.K1_B), scaled)


def _k(x: Value, inner: Value, outer: Value, scaled: bool) -> Value:
    outer = outer / hlo.sqrt(x)
    inner, outer = (inner * hlo.exponential(x), outer) if scaled else (inner, outer * hlo.exponential(-x))
    return choose((equals(x, 0.0), math.inf), (x < 0.0, math.nan), (x <= 2.0, inner), otherwise=outer)


lower("i0", "special_modified_bessel_i0", promote=FLOAT)(_i0)
lower("special_i0e", promote=FLOAT)(_i0e)
lower("special_i1", "special_modified_bessel_i1", promote=FLOAT)(_i1)
lower("special_i1e", promote=FLOAT)(_i1e)
for _order, _function in enumerate((_k0, _k1)):
    lower(f"special_modified_bessel_k{_order}", promote=FLOAT)(lambda x, _f=_function: _f(x, False))
    lower(f"special_scaled_modified_bessel_k{_order}", promote=FLOAT)(lambda x, _f=_function: _f(x, True))


# ---- Bessel functions -----------------------------------------------------------------------------------------------
def _ratio(x: Value, above: Coefficients, below: Coefficients) -> Value:
    return polynomial(x, above) / polynomial(x, below)


def _waves(x: Value, tables: tuple[Coefficients, ...], phase: float, second_kind: bool) -> Value:
    """The asymptotic form for x > 5: two modulated waves of the given phase."""
    pp, pq, qp, qq = tables
    z = 25.0 / (x * x)
    p, q = _ratio(z, pp, pq), 5.0 / x * _ratio(z, qp, qq)
    cosine, sine = hlo.cosine(x - phase), hlo.sine(x - phase)
    waves = p * sine + q * cosine if second_kind else p * cosine - q * sine
    return waves * math.sqrt(2 / math.pi) / hlo.sqrt(x)


_WAVES = (c.J0_PP, c.J0_PQ, c.J0_QP, c.J0_QQ), (c.J1_PP, c.J1_PQ, c.J1_QP, c.J1_QQ)
_PHASES = math.pi / 4, 3 * math.pi / 4


@lower("special_bessel_j0", promote=FLOAT)
def bessel_j0(x: Value) -> Value:
    x = hlo.abs_(x)
    z = x * x
    inner = (z - 5.78318596294678452118) * (z - 30.4712623436620863991) * _ratio(z, c.J0_RP, c.J0_RQ)
    return choose((x < 1e-5, 1.0 - z / 4.0), (x <= 5.0, inner), otherwise=_waves(x, _WAVES[0], _PHASES[0], False))


@lower("special_bessel_j1", promote=FLOAT)
def bessel_j1(x: Value) -> Value:
    size = hlo.abs_(x)
    z = size * size
    inner = _ratio(z, c.J1_RP, c.J1_RQ) * size * (z - 14.6819706421238932572) * (z - 49.2184563216946036703)
    value = hlo.select(size <= 5.0, inner, _waves(size, _WAVES[1], _PHASES[1], False))
    return choose((x < 0.0, -value), (equals(x, 0.0), x), otherwise=value)


@lower("special_bessel_y0", promote=FLOAT)
def bessel_y0(x: Value) -> Value:
    inner = _ratio(x * x, c.Y0_YP, c.Y0_YQ) + (2 / math.pi) * hlo.log(x) * bessel_j0(x)
    return _second_kind(x, inner, 0)


@lower("special_bessel_y1", promote=FLOAT)
def bessel_y1(x: Value) -> Value:
    inner = x * _ratio(x * x, c.Y1_YP, c.Y1_YQ) + (2 / math.pi) * (bessel_j1(x) * hlo.log(x) - 1.0 / x)
    return _second_kind(x, inner, 1)


def _second_kind(x: Value, inner: Value, order: int) -> Value:
    outer = _waves(x, _WAVES[order], _PHASES[order], True)
    return choose((equals(x, 0.0), -math.inf), (x < 0.0, math.nan), (x <= 5.0, inner), otherwise=outer)


@lower("special_spherical_bessel_j0", promote=FLOAT)
def spherical_bessel_j0(x: Value) -> Value:
    """sin(x) / x, by its series near 0."""
    series = polynomial(x * x, [(-1) ** k / math.factorial(2 * k + 1) for k in range(6, -1, -1)])
    infinite = equals(hlo.abs_(x), math.inf)
    return choose((infinite, 0.0), (hlo.abs_(x) < 0.5, series), otherwise=hlo.sine(x) / x)


@lower("special_airy_ai", promote=FLOAT)
def airy_ai(x: Value) -> Value:
    """Airy's Ai: waves below -2.09, decay above 2.09, the Maclaurin series between."""
    size = hlo.abs_(x)
    root = hlo.sqrt(size)
    zeta_ = 2.0 * size * root / 3.0
    scale = math.sqrt(1 / math.pi) / hlo.sqrt(root)
    z = 1.0 / zeta_
    zz = z * z
    t = zeta_ + math.pi / 4
    f, g = 1.0 + zz * _ratio(zz, c.AIRY_AFN, c.AIRY_AFD), z * _ratio(zz, c.AIRY_AGN, c.AIRY_AGD)
    waves = scale * (hlo.sine(t) * f - hlo.cosine(t) * g)
    decay = scale * _ratio(z, c.AIRY_AN, c.AIRY_AD) / (2.0 * hlo.exponential(zeta_))
    inner = choose((size > 8.33, 0.0), otherwise=x)
    cube = inner * inner * inner
    first = second = 1.0
    fs, gs = [1.0], [1.0]
    for k in range(1, 26 if x.dtype == torch.float64 else 16):
        first, second = first / ((3 * k - 1) * (3 * k)), second / ((3 * k) * (3 * k + 1))
        fs.append(first)
        gs.append(second)
    series = 0.355028053887817239260 * polynomial(cube, fs[::-1]) - 0.258819403792806798405 * inner * polynomial(
        cube, gs[::-1]
    )
    return choose(
        (equals(size, math.inf), math.nan),
        (x > 103.892, 0.0),
        (x < -2.09, waves),
        (x > 2.09, decay),
        otherwise=series,
    )


# ---- orthogonal polynomials -----------------------------------------------------------------------------------------
Step = Callable[[Value, Value, Value, Value], Value]


def _recurrence(x: Value, n: Value, first: Value, step: Step, looped: Value) -> Value:
    """P_n by P_{k+1} = step(x, k, P_{k-1}, P_k), with P_0 = 1 and P_1 = ``first``, where ``looped`` holds.

    Each element stops at its own degree, or at NaN; the loop ends with the last of them. It counts in whole numbers:
    those of float32 end at 2^24.
    """

    def wanted(x: Value, n: Value, p: Value, q: Value, k: Value) -> Value:
        return hlo.and_(hlo.compare(hlo.broadcast_to(k, n.shape), n, "LT"), hlo.not_(is_nan(q)))

    def unfinished(*carry: Value) -> Value:
        return hlo.reduce_one(wanted(*carry), False, range(carry[0].ndim), hlo.or_)

    def body(x: Value, n: Value, p: Value, q: Value, k: Value) -> list[Value]:
        more = wanted(x, n, p, q, k)
        following = step(x, hlo.broadcast_to(hlo.convert(k, x.dtype), n.shape), p, q)
        return [x, n, hlo.select(more, q, p), hlo.select(more, following, q), k + 1]

    steps = hlo.convert(hlo.select(looped, n, hlo.full_like(n, 0)), torch.int64)
    result = hlo.while_([x, steps, _one(x), first, hlo.constant(1, torch.int64)], unfinished, body)[3]
    return choose((n < 0.0, 0.0), (equals(n, 0.0), 1.0), otherwise=result)


def _whole(n: Value) -> Value:
    """The degree as ATen converts it to int64: what does not fit, and NaN, counts as negative."""
    fits = hlo.compare(hlo.abs_(n), 2.0**63, "LT")
    return hlo.select(fits, hlo.select(n < 0.0, hlo.ceil(n), hlo.floor(n)), hlo.full_like(n, -1))


def _chebyshev_rule(
    first: Callable[[Value], Value], trigonometric: Callable[[Value, Value], Value], threshold: int, shifted: bool
) -> Callable[[Value, Value], Value]:
    """A Chebyshev polynomial: the recurrence for small degrees and |x| >= 1, else its trigonometric form in acos(x)."""

    def rule(x: Value, n: Value) -> Value:
        n = _whole(n)
        x = 2.0 * x - 1.0 if shifted else x
        angular = hlo.and_(n > float(threshold), hlo.abs_(x) < 1.0)
        angle = hlo.acos(x)
        loop = _recurrence(x, n, first(x), lambda x, k, p, q: (x + x) * q - p, hlo.not_(angular))
        return hlo.select(angular, trigonometric(n, angle), loop)

    return rule


_CHEBYSHEV = {  # degree 1, the form in acos(x), and the degrees up to which ATen uses the recurrence, plain and shifted
    "t": (lambda x: x, lambda n, a: hlo.cosine(n * a), 6, 6),
    "u": (lambda x: x + x, lambda n, a: hlo.sine((n + 1.0) * a) / hlo.sine(a), 8, 6),
    "v": (lambda x: x + x - 1.0, lambda n, a: hlo.cosine((n + 0.5) * a) / hlo.cosine(a / 2.0), 8, 6),
    "w": (lambda x: x + x + 1.0, lambda n, a: hlo.sine((n + 0.5) * a) / hlo.sine(a / 2.0), 8, 4),
}


def _overloads(name: str) -> list[str]:
    return [name, f"{name}.x_scalar", f"{name}.n_scalar"]


for _kind, (_first, _form, _plain, _shifted) in _CHEBYSHEV.items():
    lower(*_overloads(f"special_chebyshev_polynomial_{_kind}"), promote=FLOAT)(
        _chebyshev_rule(_first, _form, _plain, False)
    )
    lower(*_overloads(f"special_shifted_chebyshev_polynomial_{_kind}"), promote=FLOAT)(
        _chebyshev_rule(_first, _form, _shifted, True)
    )


def _polynomial_rule(first: Callable[[Value], Value], step: Step, bounded: bool) -> Callable[[Value, Value], Value]:
    """A polynomial by its recurrence; ``bounded`` ones are NaN beyond the degree at which ATen gives up."""

    def rule(x: Value, n: Value) -> Value:
        n = _whole(n)
        value = _recurrence(x, n, first(x), step, hlo.compare(n, 1024.0, "LE") if bounded else equals(n, n))
        return (
            choose((n > (512.0 if x.dtype == torch.float64 else 128.0), math.nan), otherwise=value)
            if bounded
            else value
        )

    return rule


_POLYNOMIALS = {
    "hermite_polynomial_h": (lambda x: x + x, lambda x, k, p, q: (x + x) * q - (k + k) * p, True),
    "hermite_polynomial_he": (lambda x: x, lambda x, k, p, q: x * q - k * p, True),
    "laguerre_polynomial_l": (
        lambda x: 1.0 - x,
        lambda x, k, p, q: ((k + k + (1.0 - x)) * q - k * p) / (k + 1.0),
        False,
    ),
    "legendre_polynomial_p": (lambda x: x, lambda x, k, p, q: ((k + k + 1.0) * x * q - k * p) / (k + 1.0), False),
}

for _name, (_first, _step, _bounded) in _POLYNOMIALS.items():
    lower(*_overloads(f"special_{_name}"), promote=FLOAT)(_polynomial_rule(_first, _step, _bounded))
