"""Coefficients of the iterations that compute the polar factor, as functions of one singular value x.

Each step is odd in x, so it changes singular values and keeps singular vectors:
cubic, x (a + b x^2): Newton-Schulz, (1.5, -0.5), FIRE section 3;
quintic, x (a + b x^2 + c x^4), composed minimax polynomials: Polar Express (Amsel et al. 2025);
rational, x (a + b x^2) / (1 + c x^2): dynamically weighted Halley (Nakatsukasa, Bai, Gygi 2010). It costs hardly more than
the three products of a quintic, and multiplies the smallest singular value by 120 where a quintic multiplies by 4 to 8.
"""

import math

import numpy as np

Step = tuple[float, float, float]

CUBIC: Step = (1.5, -0.5, 0.0)
MUON_QUINTIC: Step = (3.4445, -4.7750, 2.0315)
"""Muon's step (Jordan et al. 2024): chosen for its slope at 0, it has no fixed point at 1."""


def rational_step(lower: float, centred: bool = False) -> Step:
    """Return (a, b, c) of the step that maps [lower, 1] to the narrowest interval [f(lower), 1], 0 < lower < 1.

    Values below `lower` are multiplied by about a. With `centred` the interval is scaled to lie evenly around 1, which
    halves the remaining error. Rounding errors grow with c: float32 needs c <= 1e4 (lower >= 2e-3).
    """
    d = (4 * (1 - lower**2) / lower**4) ** (1 / 3)
    root = math.sqrt(1 + d)
    a = root + 0.5 * math.sqrt(8 - 4 * d + 8 * (2 - lower**2) / (lower**2 * root))
    b = (a - 1) ** 2 / 4
    c = a + b - 1
    if not centred:
        return a, b, c
    scale = 2 / (1 + rational_value(lower, (a, b, c)))
    return a * scale, b * scale, c


def rational_value(x, step: Step):
    """Return x (a + b x^2) / (1 + c x^2) for a number or an array."""
    a, b, c = step
    return x * (a + b * x**2) / (1 + c * x**2)


def polynomial_value(x, step: Step):
    """Return x (a + b x^2 + c x^4) for a number or an array."""
    a, b, c = step
    return x * (a + b * x**2 + c * x**4)


def finishing_quintic(error: float) -> Step:
    """Return the quintic that maps [1 - error, 1 + error], error < 0.2, to within about 0.6 error^3 of 1.

    It equals 1 at the three Chebyshev points of the interval. Its error is a quarter of that of (15, -10, 3) / 8, which
    equals 1 three times at x = 1.
    """
    points = 1 + error * np.cos(np.pi * np.array([1, 3, 5]) / 6)
    a, b, c = np.linalg.solve(np.stack([points, points**3, points**5], axis=1), np.ones(3))
    return float(a), float(b), float(c)


def quintic_schedule(lower: float, tolerance: float) -> tuple[Step, ...]:
    """Return minimax quintics whose composition maps [lower, 1] into [1 - tolerance, 1 + tolerance].

    Each is optimal on the interval that the previous step leaves, widened for rounding. That interval is
    treated as if it began at 0.024 of its upper end or above, so that smaller values keep growing.
    """
    steps: list[Step] = []
    low, high = lower, 1.0
    while True:
        step = _minimax_quintic(max(low, 0.024 * high), high)
        # the step was computed for another lower end: rescale the image around 1
        image = polynomial_value(np.linspace(low, high, 20001), step)
        centre = (image.min() + image.max()) / 2
        a, b, c = (float(each / centre) for each in step)
        steps.append((a, b, c))
        low, high = image.min() / centre, image.max() / centre
        if max(high - 1, 1 - low) <= tolerance:
            return tuple(steps)
        low, high = low / 1.002, high * 1.002


def _minimax_quintic(low: float, high: float) -> Step:
    """Return the odd quintic nearest to 1 on [low, high], by Remez exchange."""
    points = np.array([low, low + (high - low) / 3, low + 2 * (high - low) / 3, high])
    signs = np.array([-1.0, 1.0, -1.0, 1.0])
    error = math.inf
    for _ in range(100):
        system = np.stack([points, points**3, points**5, -signs], axis=1)
        a, b, c, new_error = np.linalg.solve(system, np.ones(4))
        if abs(new_error - error) < 1e-12:
            break
        error = new_error
        points[1:3] = np.sqrt(np.sort(np.roots([5 * c, 3 * b, a]).real))  # zeros of the derivative, in x^2
    return float(a), float(b), float(c)
