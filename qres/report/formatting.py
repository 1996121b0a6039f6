"""Numbers as the reports print them: one function per quantity, `n/a` for what does not exist."""

from __future__ import annotations

import math

NA = "n/a"
MINUS = "−"
PREDICTED = "≈"

MAX_LN_RATIO = 20.0
"""A perplexity up to e^20 times as high is shown in percent."""


def significant(value: float | None, digits: int = 3) -> str:
    """A number with `digits` significant digits; scientific below 1e-4.

    >>> significant(0.05731), significant(1.234e-5), significant(None)
    ('0.0573', '1.23e−5', 'n/a')
    """
    if value is None or not math.isfinite(value):  # a sum of huge numbers
        return NA
    if value == 0:
        return "0"
    if abs(value) < 1e-4:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return _minus(f"{mantissa}e{int(exponent)}")
    return _minus(f"{value:,.{_decimals(value, digits)}f}")


def plus_minus(value: float | None, error: float | None) -> str:
    """A mean and its standard error with the same number of decimals.

    >>> plus_minus(0.05731, 0.00412), plus_minus(0.05731, None)
    ('0.0573 ± 0.0041', '0.0573')
    """
    if value is None or error is None:
        return significant(value)
    largest = max(abs(value), abs(error))
    if largest == 0:
        return "0 ± 0"
    if largest < 1e-4:
        exponent = max(math.floor(math.log10(largest)), -300)  # no power of ten is smaller than 1e-308
        return _minus(f"({value / 10**exponent:.2f} ± {error / 10**exponent:.2f})e{exponent}")
    decimals = _decimals(largest, 3)
    return _minus(f"{value:,.{decimals}f} ± {error:,.{decimals}f}")


def predicted(value: float | None, error: float | None = None) -> str:
    """A number that was calculated and not measured, with the sign that says so everywhere.

    >>> predicted(0.05731, 0.00412), predicted(None)
    ('≈0.0573 ± 0.0041', 'n/a')
    """
    return NA if value is None else f"{PREDICTED}{plus_minus(value, error)}"


def mib(size_bytes: int | None) -> str:
    """Bytes as MiB (1024 * 1024 bytes), without the unit.

    >>> mib(105_000_000), mib(1_500_000_000)
    ('100.1', '1,431')
    """
    if size_bytes is None:
        return NA
    size = size_bytes / 2**20
    return _minus(f"{size:,.0f}" if abs(size) >= 1000 else f"{size:.1f}")


def percent(fraction: float | None, digits: int = 1) -> str:
    """A fraction as percent.

    >>> percent(0.9123), percent(-0.05)
    ('91.2 %', '−5.0 %')
    """
    return NA if fraction is None else _minus(f"{100 * fraction:.{digits}f} %")


def change(ln_ratio: float | None, error: float | None = None) -> str:
    """The logarithm of a ratio as a change in percent, with its sign and, where there is one, its standard error.

    >>> change(0.01, 0.002), change(-0.01)
    ('+1.01 ± 0.20 %', '−1.00 %')
    """
    if ln_ratio is None:
        return NA
    if ln_ratio > MAX_LN_RATIO:  # a broken level: e^700 has 300 digits
        return f"× e^{ln_ratio:.0f}"
    text = f"{100 * math.expm1(ln_ratio):+.2f}"
    if error is not None:
        text += f" ± {100 * math.exp(ln_ratio) * error:.2f}"
    return _minus(f"{text} %")


def versus(ratio: float) -> str:
    """A ratio as how much less or more it is.

    >>> versus(0.6), versus(1.25)
    ('40.0 % less', '25.0 % more')
    """
    return f"{percent(abs(ratio - 1))} {'less' if ratio < 1 else 'more'}"


def fixed(value: float | None, digits: int = 2) -> str:
    """A number with a fixed number of decimals."""
    return NA if value is None else _minus(f"{value:,.{digits}f}")


def count(value: int) -> str:
    """A whole number with thousands separators."""
    return f"{value:,}"


def multiple(value: float | None, floor: float | None) -> str:
    """How many times the noise floor a value is; says so when it is below.

    >>> multiple(0.05, 0.001), multiple(0.0005, 0.001), multiple(0.05, 0.0)
    ('50×', 'below (0.50×)', 'n/a')
    """
    if value is None or not floor:
        return NA
    times = value / floor
    if times < 1:
        return f"below ({times:.2f}×)"
    return f"{times:.1f}×" if times < 10 else f"{times:,.0f}×"


def against_floor(value: float | None, floor: float | None, error: float | None = None) -> str:
    """A value with its standard error, followed by a remark when it is below the noise floor.

    >>> against_floor(0.0005, 0.001)
    '0.000500 (below floor)'
    """
    text = plus_minus(value, error)
    return f"{text} (below floor)" if is_below(value, floor) else text


def is_below(value: float | None, floor: float | None) -> bool:
    """Whether a value exists and is smaller than an existing noise floor."""
    return value is not None and floor is not None and value < floor


def _decimals(value: float, digits: int) -> int:
    return max(0, digits - 1 - math.floor(math.log10(abs(value))))


def _minus(text: str) -> str:
    return text.replace("-", MINUS)
