import torch, sys, os
from functools import partial
from deepinfer_kernels import tiling, bench
from deepinfer_kernels.tiling import MatmulTile as T
from deepinfer_kernels.linear.mxfp8_kernel import mxfp8_narrow
from deepinfer_kernels.linear.prepare_kernel import prepare_rows
from deepinfer_kernels.linear.triton_kernel import split_width
import deepinfer_kernels.moe_experts.bench_moe_experts as bm
from deepinfer_kernels.moe_experts.route_kernel import route_pairs
from deepinfer_kernels.moe_experts.up_kernel import experts_up
from deepinfer_kernels.moe_experts.down_kernel import experts_down
bench._RUNS=5
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
def nm(ti): return f"{ti.rows}x{ti.columns}w{ti.num_warps}s{ti.num_stages}"
if "fp8" in which:
  for name,(N,K) in {"wq_b":(32768,1280),"wo_b":(5120,8192),"sw1":(2304,5120)}.items():
    ref={}
    W=[(torch.randn(N,K,device="cuda").to(torch.float8_e4m3fn),torch.randint(116,124,(N//32,K//32),device="cuda",dtype=torch.uint8)) for _ in range(bench.rotation(N*K))]
    for M in (16,64):
      x=prepare_rows(torch.randn(M,K,device="cuda",dtype=bf),codes=2,quantize=True)
      for ti in ([tl(16,64,4,4),tl(16,64,4,3),tl(16,128,4,3)] if M<=16 else [tl(64,64,4,3),tl(64,128,4,3)]):
        s=t([partial(mxfp8_narrow,x,*w,1,bf,ti,split_width(N,K)) for w in W])
        o=mxfp8_narrow(x,*W[0],1,torch.float32,ti,split_width(N,K)); same=torch.equal(ref.setdefault(M,o),o)
        print(f"fp8 {name} M{M} {nm(ti)} {s*1e6:.1f}us copy {N*K/s/c.copy_bytes_per_s:.2f} same {same}",flush=True)
    del W
if "exp" in which:
  for E,sizes in ((384,(1,64)),(32,(64,4096))):
    W=bm._weights(E)
    for n in sizes:
      ref={}
      sets=1 if WARM else bench.rotation(min(E,n*6)*bm.EXPERT_BYTES)
      D=[]
      for _ in range(sets):
        idx=torch.rand(n,E,device="cuda").argsort(dim=1)[:,:6].sort(dim=1).values.int().contiguous()
        D.append((torch.randn(n,5120,device="cuda",dtype=bf),idx,torch.rand(n,6,device="cuda")))
      nch=sum(int(torch.bincount(d[1].flatten(),minlength=E).count_nonzero()) for d in D)/len(D)
      fl=2*n*6*5120*2304
      cand=[tl(16,64,4,3),tl(16,64,4,4),tl(16,128,4,3),tl(16,128,4,2)] if n*6//E<=16 else [tl(128,128,4,3),tl(128,128,4,2),tl(256,128,8,3),tl(128,256,8,3)]
      X=[prepare_rows(d[0],codes=4,quantize=True) for d in D]
      print(f"E{E} T{n} prepare {t([partial(prepare_rows,d[0],codes=4,quantize=True) for d in D])*1e6:.1f}us route {t([partial(route_pairs,d[1],E,cand[0].rows) for d in D])*1e6:.1f}us chosen {nch:.0f}",flush=True)
      for ti in cand:
        R=[route_pairs(d[1],E,ti.rows) for d in D]
        up=[partial(experts_up,x,W[0],W[1],d[2],r,limit=10.,activation=bf,quantize=True,tile=ti) for x,d,r in zip(X,D,R)]
        try: H=[u() for u in up]
        except Exception as e: print("FAIL",nm(ti),str(e)[:60]); continue
        dn=[partial(experts_down,h,W[2],W[3],r,out_dtype=bf,tile=ti) for h,r in zip(H,R)]
        a,b=t(up),t(dn)
        y=dn[0](); same=torch.equal(ref.setdefault('h',H[0]),H[0]) and torch.equal(ref.setdefault('y',y),y)
        B=bm.EXPERT_BYTES/3*nch
        print(f"E{E} T{n} {nm(ti)} up {a*1e6:.0f}us copy {2*B/a/c.copy_bytes_per_s:.2f} mm {2*fl/a/c.matmul_flops_per_s:.2f} down {b*1e6:.0f}us copy {B/b/c.copy_bytes_per_s:.2f} mm {fl/b/c.matmul_flops_per_s:.2f} same {same}",flush=True)
    del W,D,X,R,H,up,dn
