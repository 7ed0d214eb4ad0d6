import torch, sys, itertools
from functools import partial
from deepinfer_kernels import tiling, bench
from deepinfer_kernels.tiling import MatmulTile as T
from deepinfer_kernels.linear.mxfp8_kernel import mxfp8_narrow
from deepinfer_kernels.linear.plain_kernel import plain_narrow
from deepinfer_kernels.linear.prepare_kernel import prepare_rows
from deepinfer_kernels.linear.unpack_kernel import unpack_weight
from deepinfer_kernels.linear.wide_kernel import wide_matmul
import deepinfer_kernels.moe_experts.bench_moe_experts as bm
from deepinfer_kernels.moe_experts.bench_moe_experts import _weights, _case
from deepinfer_kernels.moe_experts import moe_experts
bench._REPLAYS=5
import os
WARM=bool(os.environ.get("WARM"))
if WARM:
    bench.rotation=lambda n:1; bm.rotation=bench.rotation
    c=bench.Ceilings(device="",copy_bytes_per_s=1.,matmul_flops_per_s=1.)
else:
    c=bench.measure_ceilings(); print(c, flush=True)
bf=torch.bfloat16
def t(m): 
    try:
        if WARM: m[0](); torch.cuda.synchronize(); return float('nan')
        return bench.time_calls_s(m)[0]
    except Exception as e: print("   FAIL", str(e)[:90].replace("\n"," ")); return float("nan")
def tl(r,n,w,s): return T(rows=r,columns=n,num_warps=w,num_stages=s)
which=sys.argv[1:]
if "fp8" in which:
  for name,(N,K) in {"wq_b":(32768,1280),"wo_b":(5120,8192),"wq_a":(1280,5120),"sw1":(2304,5120)}.items():
    sets=bench.rotation(N*K)
    W=[(torch.randn(N,K,device="cuda").to(torch.float8_e4m3fn),torch.randint(116,124,(N//32,K//32),device="cuda",dtype=torch.uint8)) for _ in range(sets)]
    for M in (16,64):
      x=prepare_rows(torch.randn(M,K,device="cuda",dtype=bf),codes=2,quantize=True)
      cand={16:[tl(16,64,4,4),tl(16,64,4,3),tl(16,128,8,3),tl(16,128,4,3),tl(16,32,2,5),tl(16,32,4,4),tl(16,16,1,6)],64:[tl(64,64,4,3),tl(64,128,8,3),tl(64,128,4,3),tl(64,32,2,3),tl(64,32,4,3),tl(32,64,4,4)]}[M]
      ref=None
      for ti in cand:
        try: o=mxfp8_narrow(x,*W[0],1,torch.float32,ti)
        except Exception as e: print("FAIL",ti,str(e)[:80]); continue
        if ref is None: ref=o
        s=t([partial(mxfp8_narrow,x,*w,1,bf,ti) for w in W])
        print(f"fp8 {name} M{M} {ti.rows}x{ti.columns} w{ti.num_warps} s{ti.num_stages} {s*1e6:.1f}us copy {N*K/s/c.copy_bytes_per_s:.2f} same {torch.equal(o,ref)}",flush=True)
if "wide" in which:
  for N,K,M in ((32768,1280,4096),(5120,8192,4096),(2304,5120,4096),(1280,5120,4096),(5120,5120,256)):
    x=torch.randn(M,K,device="cuda",dtype=bf); W=torch.randn(N,K,device="cuda",dtype=bf)
    ref=None
    for ti in (tl(128,256,8,3),tl(128,256,8,4),tl(128,128,8,4),tl(128,128,4,4),tl(256,128,8,3),tl(64,128,4,4)):
        try: o=wide_matmul(x,W,1,torch.float32,ti)
        except Exception as e: print("FAIL",ti,str(e)[:80]); continue
        if ref is None: ref=o
        s=t([partial(wide_matmul,x,W,1,bf,ti)])
        print(f"wide {M}x{N}x{K} {ti.rows}x{ti.columns} w{ti.num_warps} s{ti.num_stages} {s*1e6:.1f}us mm {2*M*N*K/s/c.matmul_flops_per_s:.2f} same {torch.equal(o,ref)}",flush=True)
if "plain" in which:
  for N,K in ((129280,5120),(512,5120)):
    W=[torch.randn(N,K,device="cuda",dtype=bf) for _ in range(bench.rotation(2*N*K))]
    for M,cand in ((16,[tl(16,64,4,5),tl(16,128,4,4),tl(16,32,2,6),tl(16,16,1,6),tl(16,128,8,4)]),(64,[tl(64,64,4,4),tl(64,128,8,3),tl(64,128,4,3),tl(64,16,1,4)])):
      x=torch.randn(M,K,device="cuda",dtype=bf)
      for ti in cand:
        s=t([partial(plain_narrow,x,w,torch.float32,ti) for w in W])
        print(f"plain {N}x{K} M{M} {ti.rows}x{ti.columns} w{ti.num_warps} s{ti.num_stages} {s*1e6:.1f}us copy {2*N*K/s/c.copy_bytes_per_s:.2f}",flush=True)
if "exp" in which:
  for E,sizes in ((384,(1,16,64)),(32,(64,4096))):
    W=_weights(E)
    for n in sizes:
      calls,nb=_case(n,W)
      fl=2*n*6*3*5120*2304
      avg=-(-n*6//E)
      small=[(tl(16,64,4,4),tl(16,64,4,4)),(tl(16,64,4,3),tl(16,64,4,3)),(tl(16,128,8,3),tl(16,128,8,4)),(tl(16,32,4,4),tl(16,32,4,4)),(tl(16,128,4,3),tl(16,128,4,3))]
      big=[(tl(128,128,8,2),tl(128,128,8,2)),(tl(64,128,8,3),tl(64,128,8,4)),(tl(64,64,4,2),tl(64,64,4,3)),(tl(128,64,4,2),tl(128,64,4,2)),(tl(128,64,4,3),tl(128,128,4,2)),(tl(64,128,8,2),tl(64,256,8,2)),(tl(128,64,4,2),tl(128,256,8,2))]
      for u,d in (small if avg<=16 else big):
        tiling.EXPERT_TILES=((1<<62,u),); tiling.EXPERT_DOWN_TILES=((1<<62,d),)
        s=t(calls)
        print(f"exp E{E} T{n} up {u.rows}x{u.columns} w{u.num_warps} s{u.num_stages} down {d.columns} w{d.num_warps} s{d.num_stages}: {s*1e6:.0f}us copy {nb/s/c.copy_bytes_per_s:.2f} mm {fl/s/c.matmul_flops_per_s:.2f}",flush=True)
    del W
