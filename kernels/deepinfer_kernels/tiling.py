"""Constants that fix the order of sums. None is tuned at run time; none may follow the size of a batch."""

# Rows of one matrix product in the references. A product of one row takes another CPU code path (GEMV) than one of
# several, with other bits; 16 rows always take the same one, and 16 fp32 rows start on a 64-byte boundary.
REFERENCE_ROW_TILE = 16

# The depth of a product is padded to a multiple of it: where rows of fp32 do not start on equal 64-byte boundaries
# (a depth of 33 was seen), the bits of a row follow its place in the tile.
REFERENCE_DEPTH_MULTIPLE = 16

# Keys of one product, or slots of one attention block, in the references: lists are padded to a multiple of it, so
# that the extent of a product never follows the batch. REF-K cuts its attention lists at the same 64 slots.
REFERENCE_KEY_TILE = 64

# Values that share one scale: the OCP MX formats use 32, NVFP4 uses 16.
MX_BLOCK = 32
NVFP4_BLOCK = 16

# Lanes of the sum below log-softmax: lane j adds columns j, j + 1024, ... in ascending order, then lanes are halved.
# A power of two, so that the halving is exact in shape; 1024 is one block of a GPU thread group.
LOGSUM_BLOCK = 1024
