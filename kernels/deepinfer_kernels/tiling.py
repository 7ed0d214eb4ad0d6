"""Constants that fix the order of sums. None is tuned at run time; none may follow the size of a batch."""

from dataclasses import dataclass

# Rows of one matrix product in the references. A product of one row takes another CPU code path (GEMV) than one of
# several, with other bits; 16 rows always take the same one, and 16 fp32 rows start on a 64-byte boundary.
REFERENCE_ROW_TILE = 16

# The depth of a product is padded to a multiple of it: where rows of fp32 do not start on equal 64-byte boundaries
# (a depth of 33 was seen), the bits of a row follow its place in the tile.
REFERENCE_DEPTH_MULTIPLE = 16

# Keys of one product, or slots of one attention block, in the references: lists are padded to a multiple of it, so
# that the extent of a product never follows the batch. REF-K cuts its attention lists at the same 64 slots.
REFERENCE_KEY_TILE = 64

# Heads of one product of attention in the references: a rank that holds a share of the heads takes the same products.
REFERENCE_HEAD_TILE = 4

# Values that share one scale: the OCP MX formats use 32, NVFP4 uses 16.
MX_BLOCK = 32
NVFP4_BLOCK = 16

# The sum below log-softmax. A row is cut in chunks, each with its own largest logit, so that one pass over the logits
# is enough; 16 chunks of the released vocabulary. In a chunk lane j adds columns j, j + 1024, ... in ascending order;
# then the lanes, and last the chunks, are halved. Powers of two, so that the halving is exact in shape.
LOGSUM_CHUNK = 8192
LOGSUM_BLOCK = 1024

# Elements of the logits that the references of the sampling operations work on at once. It bounds memory and fixes no
# order: 2^21 elements are 16 rows of the released vocabulary, and 16 MiB as int64.
SAMPLING_ELEMENTS = 1 << 21

# Triton kernels of the sampler. Their sums are of integers and their results are maxima, so no tile changes a bit.
# Tokens of one program of the draw: 127 programs for one row of the released vocabulary, 8 tokens of a thread.
SAMPLING_TOKENS = 1024
# Tokens of a group of the list of best tokens: 2020 groups of the released vocabulary, of which the second kernel sorts
# one token each, then the tokens of as many groups as tokens are listed.
TOP_TOKENS_GROUP = 64
# (tokens asked for up to, (tokens that the second kernel ranks, its warps)). The order of tokens is total, so none
# changes an answer; few entries, so few compilations. The reference makes longer lists.
TOP_TOKENS_LISTS = ((32, (32, 8)), (128, (128, 16)))
# Entries that one program of the restriction holds at once, 8 of a thread. A lane counts to 2^20 / 4096 at most.
RESTRICT_BLOCK = 4096
# Entries of one program of its passes over a row: 64 programs for one row of the released vocabulary. And how many of
# them are compared with 32 keys at once: 32 counts and 32 weights of a thread.
RESTRICT_CHUNK = 2048
# Up to so many rows many programs share a row; more rows take a program each, which reads the row again for every step
# of its search but compares with 3 keys at a time, not 32. Seen on an H200 with top-p: 1 row 49 us against 303, 16 rows
# 143 against 313, 64 rows 461 against 326.
RESTRICT_FEW_ROWS = 32
RESTRICT_COLUMNS = 128

# --- Triton kernels of attention, index and the elementwise family -------------------------------------------------

# Rows wider than this are summed by more warps; the width alone decides, so a row has one tree of sums. A thread of a
# norm then holds 32 values at most: enough loads in flight without spilling.
NORM_WARPS_BY_WIDTH = ((1024, 1), (2048, 4), (8192, 8), (1 << 30, 16))

# Warps of the program that norms a latent query of 1280 values: 16 values a thread.
LATENT_WARPS = 4

# Columns one program of an elementwise kernel owns: 128 threads times 8 bf16 values, one 16-byte load each.
ELEMENTWISE_BLOCK = 1024

# Mix logits: K of one product, of one part and of one group of parts. The parts of a group are added in ascending
# order, then the groups: 20480 = 40 parts = 10 groups. A program may add the parts of a whole group itself: same order,
# same bits, a quarter of the partial sums; with the weights split once it lost (80 us against 77 at 4096 rows).
HC_MIX_BLOCK_K = 64
HC_MIX_PART_K = 512
HC_MIX_PARTS_OF_GROUP = 4
# (rows up to, (rows of one tile, parts of one program, whether a launch of its own splits the weights into bf16 values,
# which every tile of rows would do again)): a tile family.
HC_MIX_TILES = ((64, (16, 1, False)), (1 << 62, (64, 1, True)))

# Rows of one tile of the TileLang kernel, which walks the same blocks and parts: one tile for every batch.
HC_MIX_TILELANG_ROWS = 64

# Tokens of one program of the Sinkhorn steps: one warp, a token per lane.
SINKHORN_BLOCK_T = 32

# Index scores: keys of one tile (the tall side of one tensor-core product), and (rows up to, rows of one program that
# may share the unpacked keys of one request). A key's score comes from its own row of the product: no tile changes it.
INDEX_KEY_TILE = 128
INDEX_ROWS = ((64, 1), (1 << 62, 8))
# Programs of one call, and at least of one group of rows, that share the tiles of a row among themselves: a graph is as
# wide as the longest context allowed, and starting a program for every tile of it would cost more than short contexts.
INDEX_PROGRAMS = 8192
INDEX_LEAST_PROGRAMS = 32
# Keys of one tile of the fp32 products, which hold their operands in registers.
INDEX_FP32_KEY_TILE = 32

# Selection: entries one program holds in registers. Longer rows are cut into chunks of it, each chunk keeps its best,
# and what was kept is cut again; the largest selection keeps a quarter of a chunk, so that every pass shortens the row.
TOPK_CHUNK = 8192
TOPK_LARGEST = 2048

# Attention: list slots of one block, as REF-K cuts them; the running maximum steps from block to block.
ATTENTION_SLOT_TILE = 64
# (rows up to, heads of one program): a tile family. Few rows take small groups, to fill the device.
ATTENTION_HEADS = ((1 << 62, 32),)
ATTENTION_WARPS = 8
# Heads of one program in the fp32 kernel, columns of its products, and columns of the result one program owns.
ATTENTION_FP32_HEADS = 16
ATTENTION_FP32_BLOCK_D = 64
# Heads and threads of one program of the TileLang kernel: 64 heads fill the tall side of a product, 256 threads hold
# their result. One tile for every batch.
ATTENTION_TILELANG_HEADS = 64
ATTENTION_TILELANG_THREADS = 256
# Attention inside an image: queries of one program, one tile for every image and width. Keys come in the 64 of above.
DENSE_ATTENTION_ROWS = 64

# --- Triton kernels of the linear layers and the experts -----------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulTile:
    """How one matrix product is cut. Any member of a family gives the same bits: K is walked in ascending order."""

    rows: int  # rows of x (tokens)
    columns: int  # rows of the weight (outputs); in the experts' first product half gate, half up
    num_warps: int
    num_stages: int


# Columns whose order is turned together so that 16-bit words unpack to whole operands (triton_formats.py): the sum over
# K runs block by block, in a block code 0 of every word first. Fixed, since it is the order of the sum; 128 divides
# every K of the model, and its four scales are one 4-byte load.
WORD_BLOCK_K = 128
# Codes in a 16-bit word.
E4M3_CODES = 2
E2M1_CODES = 4
# Rows of one program that quantises and turns activations: with 128 columns 8 values a thread.
PREPARE_ROWS = 8
# Rows of one program that writes an MXFP8 weight as bf16.
UNPACK_ROWS = 32

# K step of the product with a plain bf16 weight. K runs in ascending order, 16 at a time, so it changes no bit.
PLAIN_BLOCK_K = 128
WIDE_BLOCK_K = 64

# (outputs below, K up to, width of the parts of K). Such weights make too few programs to stream them (64 outputs each,
# 132 processors): their sum over K is cut in parts, one program each, added in ascending order. The shape of the weight
# decides, so a row has one order of its sum at any number of rows. A program walks its part in 0.4 us a block of 128:
# wide parts leave processors idle, narrow ones write more partial sums (64 rows of 5120 outputs: 1.3 MB a part). Widths
# are multiples of both K steps below.
SPLIT_K_BY_SHAPE = (
    (1024, 1 << 30, 1024),
    (2048, 1 << 30, 640),
    (8192, 1280, 1280),
    (8192, 2560, 768),
    (8192, 5120, 1280),
    (16384, 1 << 30, 2048),
)
ADD_PARTS_BLOCK = 1024

# (outputs below, rows). Up to this many rows the weight is unpacked in registers, next to the product; above, it is
# unpacked once to bf16 (3 bytes moved a weight) and multiplied from there, in the same order of K. Weights with few
# outputs have too few wide tiles to fill the processors until the rows are many.
NARROW_ROWS_BY_OUTPUTS = ((2048, 1024), (8192, 512), (1 << 62, 128))

# (rows up to, tile), in ascending order. Weights on the M side of the tensor core, rows of x on its N side. At least 64
# columns and 4 warps: then the product is wgmma. Below, Triton takes mma.sync and, since the scales are bytes, another
# order within 64 columns of K (measured: 5 to 20 % of the fp32 results differ).
MXFP8_TILES = (
    (16, MatmulTile(rows=16, columns=64, num_warps=4, num_stages=3)),
    (32, MatmulTile(rows=32, columns=64, num_warps=4, num_stages=3)),
    (1 << 62, MatmulTile(rows=64, columns=128, num_warps=4, num_stages=3)),
)
# With parts of K narrower tiles fill the processors more evenly.
MXFP8_SPLIT_TILES = (
    (16, MatmulTile(rows=16, columns=64, num_warps=4, num_stages=4)),
    (32, MatmulTile(rows=32, columns=64, num_warps=4, num_stages=4)),
    (1 << 62, MatmulTile(rows=64, columns=64, num_warps=4, num_stages=3)),
)
PLAIN_TILES = (
    (16, MatmulTile(rows=16, columns=64, num_warps=4, num_stages=5)),
    (32, MatmulTile(rows=32, columns=64, num_warps=4, num_stages=4)),
    (1 << 62, MatmulTile(rows=64, columns=64, num_warps=4, num_stages=4)),
)
# The same of weights with so many outputs, the head: 64 rows of [129280 x 5120] took 325 us with the last tile, and 358
# with that above.
PLAIN_LARGE_OUTPUTS = 16384
PLAIN_LARGE_TILES = (*PLAIN_TILES[:-1], (1 << 62, MatmulTile(rows=64, columns=128, num_warps=8, num_stages=4)))
# Both operands bf16, through the tensor memory accelerator.
WIDE_TILES = (
    (512, MatmulTile(rows=128, columns=128, num_warps=8, num_stages=4)),
    (1 << 62, MatmulTile(rows=128, columns=256, num_warps=8, num_stages=3)),
)
# With parts of K: such weights make few wide tiles, so that small ones fill the processors up to more rows.
WIDE_SPLIT_TILES = (
    (2048, MatmulTile(rows=128, columns=128, num_warps=8, num_stages=4)),
    (1 << 62, MatmulTile(rows=128, columns=256, num_warps=8, num_stages=3)),
)
# Row tiles that walk the columns together, so that the weight they read is still in L2.
WIDE_GROUP_ROWS = 8

# Rows, columns and K step of the fp32 product, which runs on the plain fp32 units: one tile, for the test modes.
EXACT_TILE = (32, 64, 32)

# Experts: (average rows of an expert up to, tile). One tile holds rows of one expert only, so some experts need two
# tiles, and read their weights twice, before the average fills one. 256 rows with 8 warps are no
# member: that tile gave other bits (seen on an H200 with Triton 3.6).
EXPERT_TILES = (
    (8, MatmulTile(rows=16, columns=64, num_warps=4, num_stages=4)),
    (16, MatmulTile(rows=32, columns=64, num_warps=4, num_stages=4)),
    (32, MatmulTile(rows=32, columns=128, num_warps=4, num_stages=3)),
    (48, MatmulTile(rows=64, columns=128, num_warps=4, num_stages=3)),
    (1 << 62, MatmulTile(rows=128, columns=128, num_warps=4, num_stages=3)),
)
EXPERT_DOWN_TILES = (
    (8, MatmulTile(rows=16, columns=128, num_warps=4, num_stages=3)),
    (16, MatmulTile(rows=32, columns=128, num_warps=4, num_stages=3)),
    (32, MatmulTile(rows=32, columns=128, num_warps=4, num_stages=3)),
    (48, MatmulTile(rows=64, columns=128, num_warps=4, num_stages=3)),
    (1 << 62, MatmulTile(rows=128, columns=256, num_warps=8, num_stages=3)),
)
# The TileLang kernels of the experts: rows of the weight and threads of one program, and (average rows of an expert up
# to, rows of one tile). Two tiles, a family: both walk K in the same order on the same tensor-core product.
EXPERT_TILELANG_COLUMNS = 128
EXPERT_TILELANG_THREADS = 128
EXPERT_TILELANG_ROWS = ((16, 16), (1 << 62, 64))
# (token, slot) pairs up to which one program sorts them by expert; above, the steps are launches of their own with
# ROUTE_BLOCK pairs a program.
ROUTE_ONE_PROGRAM = 4096
ROUTE_BLOCK = 1024
# (row, expert) pairs of one program that looks their places up. Integers: it fixes no order.
PLACES_BLOCK = 256

# Blocks of 32 (16) values of one program of the quantisers.
QUANT_BLOCKS = 64

# Exchanges over peer memory move bytes, so these fix no order. Every launch has so many programs, whatever it moves:
# each counts its exchanges, and all must agree on the half of the memory. Half of the processors of an H200: all run.
PEER_PROGRAMS = 64
# Words of one step of a program: two loads of 16 bytes of each of its 256 threads.
PEER_BLOCK = 2048
# The same of an exchange that gives every program one whole step of them: more accesses at once hide their latency.
PEER_LARGE_BLOCK = 8192
