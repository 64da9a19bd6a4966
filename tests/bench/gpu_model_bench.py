#!/usr/bin/env python3
"""Times decode steps, first tokens and memory on a GPU beside Hugging Face transformers, in one run.

    tests/bench/gpu_model_bench.py build/cuda/bin/model_bench --out tests/bench/results/<machine>/model.json

All weights are generated: only shapes matter here. A step is ours from batch to tokens on the host, memories included; the
peer's is a forward pass of transformers with a static cache and torch's sdpa, captured in a CUDA graph (which transformers
does not do by itself), and where it is asked for (--compile) torch.compile. The floor reads each matrix, and each memory, once
at 4.0 TB/s. Needs torch and transformers for the peers; one that does not run is left out, and said so.
"""
import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time

BANDWIDTH = 4.0e12
# Prompt rows of a pass: what a server takes while nothing decodes (4 × --prefill-chunk).
PROMPT_ROWS = "8192"
SHAPES = {
    "smollm2-135m": dict(hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
                         num_key_value_heads=3, vocab_size=49152, max_position_embeddings=8192, rope_theta=100000.0,
                         tie_word_embeddings=True),
    "llama-3.1-8b": dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
                         num_key_value_heads=8, vocab_size=128256, max_position_embeddings=140000, rope_theta=500000.0),
}
# Sequences on memories, slots of a memory, goal in milliseconds.
STEPS = {
    "smollm2-135m": [(1, 1, 1024, 0.6), (16, 1, 1024, None), (256, 1, 1024, None)],
    "llama-3.1-8b": [(1, 1, 2048, 4.3), (8, 1, 2048, None), (64, 1, 2048, 5.5), (256, 1, 2048, None), (8, 8, 2048, None),
                     (64, 64, 2048, 8.5), (256, 64, 2048, None)],
}
PEERS = {"smollm2-135m": [(1, 1024), (16, 1024), (256, 1024)], "llama-3.1-8b": [(1, 2048), (8, 2048), (64, 2048)]}


def ours(program, shape, arguments):
    command = [program, "--device", "cuda", "--random-weights", shape, "--kv", "bf16", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def saved(paths):
    """{shape: what model_bench printed}, of SHAPE=FILE arguments: a file holds one JSON object a line among other text."""
    out = {}
    for shape, path in (pair.split("=", 1) for pair in paths):
        for line in open(path, errors="replace"):
            if line.startswith('{"backend"'):
                steps = json.loads(line).get("steps", [])
                floor = {"smollm2-135m": 2.9e8, "llama-3.1-8b": 1.5e10}[shape]
                # The model that a saved line is of shows in what a step must read.
                if steps and floor / 2 < steps[0]["floor_bytes"] < 2.5 * floor:
                    out.setdefault(shape, []).extend(steps)
    return out


def median_ms(torch, body, least=0.2, most=100):
    body()
    torch.cuda.synchronize()
    times, begin = [], time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begin < least and len(times) < most):
        start = time.perf_counter()
        body()
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def static_cache(torch, config, batch, slots, room):
    from transformers import StaticCache
    cache = StaticCache(config=config, max_cache_len=slots + room)
    width = config.hidden_size // config.num_attention_heads
    for layer in cache.layers:
        some = torch.empty(batch, config.num_key_value_heads, 1, width, device="cuda", dtype=torch.bfloat16)
        layer.lazy_initialization(some, some)
        layer.keys.normal_()
        layer.values.normal_()
        layer.cumulative_length.fill_(slots)
    return cache


def peer_model(torch, shape):
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(**SHAPES[shape], attn_implementation="sdpa")
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model, config


def peers(shape, sizes, compile_sizes):
    """{(batch, how): ms}; how is "CUDA graph", "eager" or "torch.compile"."""
    import torch
    out = {}
    model, config = peer_model(torch, shape)
    for batch, slots in sizes:
        room = 512
        tokens = torch.randint(0, config.vocab_size, (batch, 1), device="cuda")
        positions = torch.full((batch, 1), slots, device="cuda")
        cache = None

        def step(run=model):
            logits = run(input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True).logits
            return logits[:, -1].argmax(-1)

        for how in ("CUDA graph", "eager", "torch.compile"):
            if how == "torch.compile" and batch not in compile_sizes:
                continue
            if how == "eager" and batch != 1:
                continue
            try:
                cache = static_cache(torch, config, batch, slots, room)
                with torch.no_grad():
                    if how == "CUDA graph":
                        side = torch.cuda.Stream()
                        side.wait_stream(torch.cuda.current_stream())
                        with torch.cuda.stream(side):
                            for _ in range(2):
                                step()
                        torch.cuda.current_stream().wait_stream(side)
                        graph = torch.cuda.CUDAGraph()
                        with torch.cuda.graph(graph):
                            step()
                        out[batch, how] = median_ms(torch, graph.replay)
                        del graph
                    elif how == "eager":
                        out[batch, how] = median_ms(torch, step, most=20)
                    else:
                        torch._dynamo.reset()
                        run = torch.compile(model, mode="reduce-overhead", fullgraph=True)
                        for _ in range(3):
                            step(run)
                        out[batch, how] = median_ms(torch, lambda: step(run))
            except Exception as error:  # a peer that fails is no failure of ours
                print(f"transformers, {how}, {shape}, batch {batch}, does not run: {str(error)[:300]}", file=sys.stderr)
            cache = None
            torch.cuda.empty_cache()
            print(f"transformers {shape} batch {batch} {how}: {out.get((batch, how))} ms", file=sys.stderr)
    del model
    torch.cuda.empty_cache()
    return out


def prefill_peers(shape, sizes):
    """{tokens: milliseconds from a prompt to the logits after it}, torch's sdpa, one pass; what does not run is left out."""
    import torch
    out = {}
    model, config = peer_model(torch, shape)
    for tokens in sizes:
        prompt = torch.randint(0, config.vocab_size, (1, tokens), device="cuda")
        warm = prompt[:, :2048]

        def run(ids):
            with torch.no_grad():
                return model(input_ids=ids, use_cache=True, logits_to_keep=1).logits.argmax(-1).item()

        try:
            run(warm)
            if tokens <= 8192:
                out[tokens] = median_ms(torch, lambda: run(prompt))
            else:
                torch.cuda.synchronize()
                begin = time.perf_counter()
                run(prompt)
                out[tokens] = 1e3 * (time.perf_counter() - begin)
        except Exception as error:  # a peer that fails is no failure of ours
            print(f"transformers, prompt of {tokens}, does not run: {str(error)[:300]}", file=sys.stderr)
        torch.cuda.empty_cache()
        print(f"transformers {shape} prompt of {tokens}: {out.get(tokens)} ms", file=sys.stderr)
    del model
    torch.cuda.empty_cache()
    return out


def prefill_floor_ms(shape, tokens):
    """Products and causal attention at 790 TFLOP/s."""
    s = SHAPES[shape]
    hidden, layers, heads = s["hidden_size"], s["num_hidden_layers"], s["num_attention_heads"]
    kv = hidden // heads * s["num_key_value_heads"]
    matrices = 2 * hidden * hidden + 2 * hidden * kv + 3 * hidden * s["intermediate_size"]
    return 1e3 * layers * (2 * tokens * matrices + 2 * hidden * tokens * tokens) / 790e12


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bench", help="the model_bench program")
    parser.add_argument("--out", required=True, help="the result file")
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--saved", action="append", default=[], metavar="SHAPE=FILE",
                        help="take our steps from what model_bench printed before, and run nothing of ours")
    parser.add_argument("--note", default="")
    parser.add_argument("--plans", help="for model_bench --plans")
    parser.add_argument("--machine", default="")
    parser.add_argument("--compile", default="", help="batches that torch.compile is tried on, as 1,64")
    parser.add_argument("--context", type=int, default=131072, help="tokens of the corpus that a cartridge stands for; 0: none")
    args = parser.parse_args()
    plans = ["--plans", args.plans] if args.plans else []
    compile_sizes = [int(b) for b in args.compile.split(",") if b]
    rows = []
    command = "tests/bench/gpu_model_bench.py build/cuda/bin/model_bench"
    if args.saved:
        command = ("model_bench --device cuda --random-weights SHAPE --kv bf16 --steps-of 1x1,… --slots SLOTS, its output written down "
                   "by tests/bench/gpu_model_bench.py --saved")

    def row(name, value, goal=None, floor=None, peer=None, peer_name=None, unit="ms", better="less", **more):
        met = None if goal is None else (value <= goal if better == "less" else value >= goal)
        ratio = None if not peer else round(peer / value if better == "less" else value / peer, 3)
        rows.append(dict(name=name, ours=round(value, 4), peer=peer and round(peer, 4), peer_name=peer_name,
                         floor=floor and round(floor, 4), unit=unit, ratio=ratio, goal=goal and round(goal, 4), met=met, **more))
        save()
        print(json.dumps(rows[-1]))

    def save():
        gpu = args.machine
        if not gpu:
            gpu = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                                 capture_output=True, text=True).stdout.strip().split("\n")[0]
        note = dict(note=args.note) if args.note else {}
        with open(args.out, "w") as file:
            json.dump(dict(commit=args.commit, date=datetime.date.today().isoformat(), machine=gpu,
                           command=command, **note, rows=rows), file, indent=1)

    kept = saved(args.saved)
    for shape in args.shapes.split(","):
        measured = {(s["sequences"], s["memories"], s["slots"]): s for s in kept.get(shape, [])}
        for slots in sorted({s[2] for s in STEPS[shape]} if not args.saved else ()):
            pairs = [f"{s[0]}x{s[1]}" for s in STEPS[shape] if s[2] == slots]
            result = ours(args.bench, shape, ["--steps-of", ",".join(pairs), "--slots", str(slots), "--steps", "40",
                                              "--kv-bytes", str(24 << 30), *plans])
            for step in result["steps"]:
                measured[step["sequences"], step["memories"], slots] = step
        theirs = {} if args.no_peers else peers(shape, PEERS[shape], compile_sizes)
        for sequences, memories, slots, goal in STEPS[shape]:
            step = measured.get((sequences, memories, slots))
            if step is None:
                continue
            best = min(((ms, how) for (batch, how), ms in theirs.items() if batch == sequences), default=(None, None))
            what = f"{memories} memories" if memories > 1 else "one memory"
            row(f"{shape}, decode, B={sequences} on {what} of {slots} slots", step["ms"], goal,
                1e3 * step["floor_bytes"] / BANDWIDTH, best[0],
                best[1] and f"transformers, static cache of its own for each, {best[1]}", recorded=step["recorded"],
                spans_ms=step.get("spans_ms"))
        for (batch, how), ms in theirs.items():
            row(f"{shape}, decode, B={batch}, transformers, {how}: for comparison", ms, peer=ms, peer_name="itself")
    if args.context > 0 and not args.saved and "llama-3.1-8b" in args.shapes:
        prompts = [n for n in (2048, 32768) if n < args.context] + [args.context]
        result = ours(args.bench, "llama-3.1-8b", ["--first-token", ",".join(map(str, prompts)), "--slots", "2048", "--chunk", PROMPT_ROWS,
                                                   "--kv-bytes", str(24 << 30), *plans])
        theirs = {} if args.no_peers else prefill_peers("llama-3.1-8b", prompts)
        first = result["first_token_ms"]
        short = first["32 tokens on a memory"]
        row(f"llama-3.1-8b, first token after 32 tokens on a memory of 2048 slots", short)
        for tokens in prompts:
            # The goal is to be no slower than the peer in the same run.
            row(f"llama-3.1-8b, first token after a prompt of {tokens} tokens", first[str(tokens)], theirs.get(tokens),
                prefill_floor_ms("llama-3.1-8b", tokens), theirs.get(tokens), tokens in theirs and "transformers, sdpa" or None)
        row(f"first token of a corpus of {args.context} tokens: prompt over memory", first[str(args.context)] / short, 500, unit="times",
            better="more")
        per_slot = result["kv_bytes_per_slot"]
        row("llama-3.1-8b, key/value bytes of a resident corpus, memory of 2048 slots", 2048 * per_slot, unit="bytes",
            peer=args.context * per_slot, peer_name=f"all {args.context} tokens")
        row("key/value bytes: whole corpus over memory", args.context / 2048, 60, unit="times", better="more")
    save()


if __name__ == "__main__":
    main()
