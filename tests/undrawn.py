"""`python -m tests.undrawn`: qres, but for the images of charts, which take seconds and are looked at elsewhere.

A chart is still compiled, so that one that cannot be drawn ends the program as it would.
"""

from __future__ import annotations

from typing import Any


def compiled(spec: Any, vl_version: Any, config: Any) -> str:  # noqa: ANN401 - as vl_convert takes them
    """In place of an image: nothing, of a chart that Vega-Lite takes."""
    import vl_convert

    vl_convert.vegalite_to_vega(spec, vl_version=vl_version, config=config)
    return '<svg xmlns="http://www.w3.org/2000/svg"/>'


if __name__ == "__main__":  # not in the processes that it starts
    import vl_convert

    from qres.__main__ import main

    setattr(vl_convert, "vegalite_to_svg", compiled)  # noqa: B010 - mypy compares the signatures
    main()
