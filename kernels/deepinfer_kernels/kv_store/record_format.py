"""The packed forms a cache record may have, and how many bytes each takes."""

import enum

from deepinfer_kernels.errors import ShapeError


class RecordFormat(enum.Enum):
    """How one vector of the cache is stored.

    MXFP8 and NVFP4 records hold their values, then their scales. MXFP4 pages hold the values of all their
    records, then the scales of all their records. FP32 records hold the plain values.

    Source: REF (native numerics of the checkpoint); spec section 6.1.
    """

    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    MXFP4 = "mxfp4"
    FP32 = "fp32"

    @property
    def group_width(self) -> int:
        """Values that share one scale; 1 where there is none."""
        return _GROUP_WIDTHS[self]

    @property
    def is_segregated(self) -> bool:
        """Whether a page keeps all values before all scales."""
        return self is RecordFormat.MXFP4

    def value_bytes(self, width: int) -> int:
        """Bytes of the values of a record of ``width`` elements."""
        return width * _BITS[self] // 8

    def scale_bytes(self, width: int) -> int:
        """Bytes of the scales of a record of ``width`` elements, one per group."""
        return 0 if self is RecordFormat.FP32 else width // _GROUP_WIDTHS[self]

    def record_bytes(self, width: int) -> int:
        """Bytes of a record of ``width`` elements.

        Raises:
            ShapeError: ``width`` is not a positive multiple of the group width.
        """
        group_width = _GROUP_WIDTHS[self]
        if width <= 0 or width % group_width != 0:
            raise ShapeError(
                f"record_bytes: width is {width}, expected a positive multiple of {group_width} for {self.value}; "
                "choose a format whose groups divide the vector"
            )
        return self.value_bytes(width) + self.scale_bytes(width)


_GROUP_WIDTHS = {RecordFormat.MXFP8: 32, RecordFormat.NVFP4: 16, RecordFormat.MXFP4: 32, RecordFormat.FP32: 1}
_BITS = {RecordFormat.MXFP8: 8, RecordFormat.NVFP4: 4, RecordFormat.MXFP4: 4, RecordFormat.FP32: 32}
