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

# --- Triton kernels of attention, index and the elementwise family -------------------------------------------------

# Rows wider than this are summed by more warps; the width alone decides, so a row has one tree of sums. A thread of a
# norm then holds 32 values at most: enough loads in flight without spilling.
NORM_WARPS_BY_WIDTH = ((1024, 1), (2048, 4), (8192, 8), (1 << 30, 16))

# Columns one program of an elementwise kernel owns: 128 threads times 8 bf16 values, one 16-byte load each.
ELEMENTWISE_BLOCK = 1024

# Mix logits: lanes of the dot product's K step, and the width of one part of K. The parts are added in ascending order,
# by one program or by a second kernel, with the same bits. 20480 = 10 parts: enough programs at one row.
HC_MIX_BLOCK_K = 64
HC_MIX_SPLIT_K = 2048
# (rows up to, rows of one tile): a tile family, the bits of a row do not follow the tile.
HC_MIX_TILES = ((64, 16), (1024, 32), (1 << 62, 64))

# Tokens of one program of the Sinkhorn steps: one warp, a token per lane.
SINKHORN_BLOCK_T = 32

# Index scores: keys of one tile (the rows of one tensor-core product), and (rows up to, rows of one program that may
# share the unpacked keys of one request). A key's score is one column of a product: no tile changes its bits.
INDEX_KEY_TILE = 64
INDEX_ROWS = ((64, 1), (1 << 62, 8))
# Key tiles that one program walks, so that loads overlap products; bounds the programs at one million entries.
INDEX_TILES_PER_PROGRAM = 4

# Selection: entries up to which one program holds a whole row in registers, and the entries of one program above that.
TOPK_ROW_LIMIT = 8192
TOPK_CHUNK = 8192
# Rows whose histograms exist at one time: 3 * 2048 counters of 4 bytes each, 25 MB.
TOPK_ROWS_AT_ONCE = 1024

# Attention: list slots of one block, as REF-K cuts them; the running maximum steps from block to block.
ATTENTION_SLOT_TILE = 64
# Heads of one program in the fp32 kernel, columns of its products, and columns of the result one program owns.
ATTENTION_FP32_HEADS = 16
ATTENTION_FP32_BLOCK_D = 64
