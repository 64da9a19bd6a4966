#!/usr/bin/env python3
"""Times attention on the GPU beside cuDNN's and FlashAttention's kernels (PyTorch), in one run, each inside a CUDA graph.

    tests/bench/gpu_attention_peers.py build/cuda/bin/attention_gpu_bench --out tests/bench/results/<machine>/attention.json

Needs torch with CUDA for the peers; a peer that does not run is left out, and said so.
"""
import argparse
import datetime
import json
import statistics
import subprocess
import sys
import threading

HEADS, KV_HEADS, WIDTH = 32, 8, 128
PEAK = 790e12   # bf16 operations a second, measured on this chip


def time_graph(torch, body, calls):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(calls):
            body(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            body(i)
    times, total = [], 0.0
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    while len(times) < 3 or (total < 150 and len(times) < 200):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
        total += times[-1]
    return 1e3 * statistics.median(times[1:]) / calls  # µs


def peers(torch):
    """{(kind, size): {peer: µs}} for cuDNN and FlashAttention."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    backends = {"cuDNN SDPA": SDPBackend.CUDNN_ATTENTION, "flash (PyTorch)": SDPBackend.FLASH_ATTENTION}

    def random(*shape):
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    out = {}
    for kind, batch, size in (("decode", 64, 2048), ("decode", 1, 2048), ("decode", 1, 131072), ("prefill", 1, 2048),
                              ("prefill", 1, 8192), ("prefill", 1, 32768)):
        rows = 1 if kind == "decode" else size
        bytes_of_one = 2 * 2 * batch * KV_HEADS * size * WIDTH
        copies = max(1, min(16, int(256e6 / bytes_of_one))) if kind == "decode" else 1
        q = random(batch, HEADS, rows, WIDTH)
        kv = [(random(batch, KV_HEADS, size, WIDTH), random(batch, KV_HEADS, size, WIDTH)) for _ in range(copies)]
        for name, backend in backends.items():
            def body(i):
                k, v = kv[i % copies]
                with sdpa_kernel(backend):
                    return sdpa(q, k, v, is_causal=kind == "prefill", enable_gqa=True)

            try:
                calls = max(copies, 16) if kind == "decode" and bytes_of_one < 1e8 else copies
                out.setdefault((kind, batch, size), {})[name] = time_graph(torch, body, calls)
            except RuntimeError as error:
                print(f"{name} does not run {kind} {batch} x {size}: {str(error)[:200]}", file=sys.stderr)
        del q, kv
        torch.cuda.empty_cache()
    return out


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", help="the attention_gpu_bench program")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--machine", default=None)
    parser.add_argument("--out", help="result file")
    args = parser.parse_args()

    ours = {}
    with subprocess.Popen([args.bench], stdout=subprocess.PIPE, text=True) as bench:
        timer = threading.Timer(120, bench.kill)
        timer.start()
        for line in bench.stdout:  # what a program that stops had measured counts
            print(line, end="", flush=True)
            ours[json.loads(line)["name"]] = json.loads(line)
        timer.cancel()
    if bench.returncode:
        print(f"{args.bench} ended with {bench.returncode}", file=sys.stderr)
    measured = {}
    try:
        import torch
        measured = peers(torch)
        name = torch.cuda.get_device_name()
    except ImportError as error:
        print(f"no peers: {error}", file=sys.stderr)
        name = "GPU"

    # Bytes a second, reads and writes counted, of a copy in the same run.
    copy = 1e9 * ours["copy of 512 MiB"]["gb_per_s"] if "copy of 512 MiB" in ours else 4.26e12

    def floor_us(kind, batch, size, shared=False):
        if kind == "decode":
            return 1e6 * 2 * 2 * (1 if shared else batch) * KV_HEADS * size * WIDTH / copy
        return 1e6 * 2 * size * (size + 1) * HEADS * WIDTH / PEAK

    rows = []

    def row(name, key, goal, shared=False):
        if name not in ours:
            return
        us = ours[name]["us"]
        best = min(measured.get(key, {}).items(), key=lambda item: item[1], default=(None, None))
        if goal is None and best[1]:
            goal = best[1] / 0.95
        rows.append({"name": name, "ours": us, "peer": best[1] and round(best[1], 2),
                     "peer_name": best[0] and best[0] + (", private caches" if shared else ""),
                     "floor": round(floor_us(*key, shared), 2), "unit": "us", "ratio": best[1] and round(best[1] / us, 3),
                     "goal": goal and round(goal, 2), "met": us <= goal if goal else None})

    row("decode, B=64, 2048 private slots, bf16", ("decode", 64, 2048), 135)
    row("decode, B=64, 2048 shared slots, bf16", ("decode", 64, 2048), 15, shared=True)
    row("decode, B=1, 2048 slots, bf16", ("decode", 1, 2048), 6)
    row("decode, B=1, 131072 slots, bf16", ("decode", 1, 131072), 135)
    for size in (2048, 8192, 32768):
        row(f"prefill, {size} rows, bf16", ("prefill", 1, size), None)
    named = {r["name"] for r in rows}
    for key, value in ours.items():
        if key not in named:
            rows.append({"name": key, "ours": value["us"], "peer": None, "peer_name": None, "floor": None, "unit": "us",
                         "ratio": None, "goal": None, "met": None})
    result = {"commit": args.commit, "date": datetime.date.today().isoformat(), "machine": args.machine or name,
              "command": "tests/bench/gpu_attention_peers.py build/cuda/bin/attention_gpu_bench", "rows": rows}
    for r in rows:
        print(f"{r['name']:58} ours {r['ours']:10.2f}  peer {r['peer'] or 0:10.2f} {r['peer_name'] or '':28} floor {r['floor'] or 0:9.2f}"
              f"  {({True: 'met', False: 'NOT MET'}).get(r['met'], '')}")
    print(json.dumps({str(key): value for key, value in measured.items()}))
    if args.out:
        with open(args.out, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    main()
