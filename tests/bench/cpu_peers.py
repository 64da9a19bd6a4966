#!/usr/bin/env python3
"""Times this project and its peers on the CPU: llama.cpp (llama-cpp-python) and Hugging Face in fp32, one run, one GGUF file.

The three take turns, round by round, so that a machine whose speed drifts treats them alike; each figure is the median over rounds.

    tests/bench/cpu_peers.py build/cpu/bin/model_bench .cache/models/SmolLM2-135M-Instruct.Q4_1.gguf \
        --threads 2 --rounds 3 --out tests/bench/results/<machine>/cpu_peers.json

Peers need: pip install llama-cpp-python torch transformers accelerate gguf (a peer that is missing is left out, and said so).
"""
import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import time

PREFILL = (64, 512, 2048)
DECODE = (32, 2048)


def llama_cpp_round(path, threads, ids):
    import llama_cpp

    llama = llama_cpp.Llama(path, n_ctx=4096, n_threads=threads, n_threads_batch=threads, verbose=False)
    out = {}

    def evaluate(tokens):
        begin = time.perf_counter()
        llama.eval(tokens)
        llama_cpp.llama_synchronize(llama._ctx.ctx)
        return time.perf_counter() - begin

    for n in PREFILL:
        llama.reset()
        out[f"prefill {n}"] = n / evaluate(ids[:n])
    for n in DECODE:
        llama.reset()
        llama.eval(ids[:n])
        out[f"decode {n}"] = 1 / statistics.median(evaluate([400]) for _ in range(48))
    return out


def hugging_face():
    """Yields after each round; kept alive between rounds because loading takes long."""
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache

    path, threads, ids = yield
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        os.path.dirname(os.path.abspath(path)), gguf_file=os.path.basename(path), dtype=torch.float32).eval()
    for p in model.parameters():
        p.requires_grad_(False)
    x = torch.tensor([ids])
    config = model.config
    shape = (1, config.num_key_value_heads, 128, config.hidden_size // config.num_attention_heads)
    out = None
    while True:
        yield out
        out = {}
        with torch.inference_mode():
            for n in PREFILL:
                begin = time.perf_counter()
                model(x[:, :n], logits_to_keep=1)
                out[f"prefill {n}"] = n / (time.perf_counter() - begin)
            for n in DECODE:
                cache = model(x[:, :n], use_cache=True, logits_to_keep=1).past_key_values
                times = []
                for _ in range(16):
                    begin = time.perf_counter()
                    model(torch.tensor([[400]]), past_key_values=cache, use_cache=True)
                    times.append(time.perf_counter() - begin)
                out[f"decode {n}"] = 1 / statistics.median(times)
        n = 1024
        cache = DynamicCache()
        for layer in range(config.num_hidden_layers):
            cache.update(torch.randn(shape, requires_grad=True), torch.randn(shape, requires_grad=True), layer)
        begin = time.perf_counter()
        logits = model(x[:, :n], past_key_values=cache, use_cache=True, position_ids=torch.arange(128, 128 + n)[None]).logits
        torch.nn.functional.cross_entropy(logits[0, :-1], x[0, 1:n]).backward()
        out["train 1024"] = n / (time.perf_counter() - begin)


def ours_round(bench, path, threads):
    text = subprocess.run([bench, path, "--threads", str(threads), "--repeats", "1"], check=True, capture_output=True,
                          text=True).stdout
    r = json.loads(text)
    out = {f"prefill {n}": r["prefill_tok_s"][str(n)] for n in PREFILL}
    out |= {f"decode {n}": r["decode_tok_s"][str(n)] for n in DECODE}
    out["shared 16"] = r["shared_decode_tok_s"]["16x256"]
    out["train 1024"] = r["train_tok_s"]["1024"]
    return out, r["backend"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", help="the model_bench program")
    parser.add_argument("model", help="GGUF file")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--machine", default=None, help="name of the machine in the result (default: its processor)")
    parser.add_argument("--out", help="result file")
    args = parser.parse_args()

    import random
    ids = [random.Random(0).randrange(100, 40000) for _ in range(2048)]
    rounds = {"ours": [], "llama.cpp": [], "hugging face fp32": []}
    versions, missing = {}, []
    hf = hugging_face()
    try:
        next(hf)
        hf.send((args.model, args.threads, ids))
        import transformers
        versions["hugging face fp32"] = transformers.__version__
    except ImportError as error:
        missing.append(f"hugging face: {error}")
        hf = None
    try:
        import llama_cpp
        versions["llama.cpp"] = llama_cpp.__version__
    except ImportError as error:
        missing.append(f"llama.cpp: {error}")
        llama_cpp = None
    backend = ""
    for i in range(args.rounds + 1):  # the first warms files and caches and does not count
        row, backend = ours_round(args.bench, args.model, args.threads)
        rounds["ours"].append(row)
        if llama_cpp:
            rounds["llama.cpp"].append(llama_cpp_round(args.model, args.threads, ids))
        if hf:
            rounds["hugging face fp32"].append(next(hf))
        print(f"round {i} of {args.rounds}: {json.dumps({k: v[-1] for k, v in rounds.items() if v})}", file=sys.stderr)
    median = {
        who: {key: statistics.median(r[key] for r in rows[1:]) for key in rows[-1]} for who, rows in rounds.items() if rows
    }

    ours = median["ours"]
    rows = []

    def add(name, key, peers, goal, floor):
        best = max(((median[p][k], p) for p, k in peers if p in median and k in median[p]), default=(None, None))
        ratio = round(ours[key] / best[0], 3) if best[0] else None
        rows.append({
            "name": name, "ours": round(ours[key], 1), "peer": round(best[0], 1) if best[0] else None,
            "peer_name": f"{best[1]} {versions.get(best[1], '')}".strip() if best[1] else None, "floor": floor, "unit": "tokens/s",
            "ratio": ratio, "goal": goal, "met": ratio is not None and ratio >= goal})

    for n in DECODE:
        add(f"decode at context {n}", f"decode {n}", [("llama.cpp", f"decode {n}")], 2.0, 450)
    for n in PREFILL:
        add(f"prefill {n}", f"prefill {n}", [("llama.cpp", f"prefill {n}"), ("hugging face fp32", f"prefill {n}")], 1.15, 1000)
    add("16 sequences decoding on one cartridge of 256 slots", "shared 16", [("llama.cpp", "decode 32")], 5.0, 1000)
    add("training a prefix of 128 slots, rows of 1024", "train 1024", [("hugging face fp32", "train 1024")], 1.7, 400)

    machine = args.machine
    if machine is None:
        with open("/proc/cpuinfo") as f:
            machine = next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
        machine += f", {args.threads} threads"
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    result = {
        "commit": commit, "date": datetime.date.today().isoformat(), "machine": machine, "backend": backend,
        "command": f"tests/bench/cpu_peers.py MODEL_BENCH MODEL --threads {args.threads} --rounds {args.rounds}",
        "left_out": missing, "rows": rows}
    if args.out:
        os.makedirs(os.path.dirname(args.out), exist_ok=True)
        with open(args.out, "w") as f:
            json.dump(result, f, indent=1)
            f.write("\n")
    width = max(len(r["name"]) for r in rows)
    for r in rows:
        peer = f"{r['peer']:8.1f} {r['peer_name']}" if r["peer"] else "       - (no peer)"
        print(f"{r['name']:{width}}  {r['ours']:8.1f}  {peer}  ratio {r['ratio']}  goal {r['goal']}  {'met' if r['met'] else 'MISSED'}")
    for line in missing:
        print(f"left out: {line}")


if __name__ == "__main__":
    main()
