#!/usr/bin/env python3
"""The quality table: builds memories of real documents and writes what each recovers, beside truncation at the same size.

    tests/bench/recovered.py build/cpu/bin/stillhouse-recovered MODEL.gguf --squad articles.json \
        --articles 0,1,3,9,20-23 --document /usr/share/common-licenses/Apache-2.0 --questions deploy/questions/apache-2.0.txt \
        --build CARTRIDGE:quick:10 --build ATTENTION_MATCHING:quick:8 --out tests/bench/results/<machine>/recovered.json

Documents are the articles of a SQuAD-format file (their paragraphs joined, or several articles joined: 20-23) with the articles' own
questions, and text files with questions of their own. Each build runs by itself; the file is written anew after each, so that a run
that is stopped keeps what it has. `recovered` is (NLL none - NLL memory) / (NLL none - NLL full context) of the full context's greedy
answers; `kl` is KL(full context || memory) on them, nats per token.
"""
import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor

GOALS = {("CARTRIDGE", "quick", 10): 0.90, ("CARTRIDGE", "standard", 10): 0.97, ("CARTRIDGE", "standard", 40): 0.85,
         ("CARTRIDGE", "thorough", 10): 1.03, ("CARTRIDGE", "thorough", 40): 0.92, ("ATTENTION_MATCHING", "quick", 8): 0.75}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("model")
    parser.add_argument("--squad")
    parser.add_argument("--articles", default="", help="comma-separated; 20-23 joins")
    parser.add_argument("--document", action="append", default=[])
    parser.add_argument("--questions", action="append", default=[])
    parser.add_argument("--build", action="append", required=True, help="METHOD:profile:ratio; repeat it")
    parser.add_argument("--max-questions", type=int, default=48)
    parser.add_argument("--threads", type=int, default=2, help="of one build")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gpu-weights", choices=("f32", "bf16"), default="f32")
    parser.add_argument("--gpus", type=int, default=1, help="builds take turns on them")
    parser.add_argument("--parallel", type=int, default=1, help="builds at a time; their seconds then say little")
    parser.add_argument("--machine", required=True)
    parser.add_argument("--commit", help="that was built; the checkout's own if left out")
    parser.add_argument("--out", required=True)
    args = parser.parse_args()

    subjects = [["--squad", args.squad, "--articles", a] for a in args.articles.split(",") if a]
    subjects += [["--document", d, "--questions", q] for d, q in zip(args.document, args.questions, strict=True)]
    commit = args.commit or subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
    result = {"commit": commit, "date": datetime.date.today().isoformat(), "machine": args.machine,
              "command": "tests/bench/recovered.py PROGRAM MODEL --squad SQUAD --articles " + args.articles + "".join(
                  f" --document {os.path.basename(d)}" for d in args.document) + "".join(f" --build {b}" for b in args.build)
              + f" --max-questions {args.max_questions} --device {args.device}" + (f" --gpu-weights {args.gpu_weights}" if args.device == "cuda" else ""),
              "rows": [], "builds": []}

    def write():
        rows = []
        for build in args.build:
            method, profile, ratio = build.split(":")
            done = [b for b in result["builds"] if (b["method"], b["profile"], b["ratio"]) == (method, profile, float(ratio))]
            if not done:
                continue
            mean = lambda memory, key: sum(b[memory][key] for b in done) / len(done)
            goal = GOALS.get((method, profile, int(float(ratio))))
            ours, peer = mean("cache", "recovered"), mean("truncated", "recovered")
            rows.append({"name": f"recovered, {method} {profile} at {ratio}x, mean of {len(done)} documents", "ours": round(ours, 4),
                         "peer": round(peer, 4), "peer_name": "the document's first tokens, same number of slots", "floor": None,
                         "unit": "share of the full context's gain", "ratio": round(ours / peer, 3) if peer else None, "goal": goal,
                         "met": None if goal is None else ours >= goal,
                         "kl": round(mean("cache", "kl"), 4), "kl_none": round(mean("none", "kl"), 4),
                         "seconds": round(sum(b["seconds"] for b in done) / len(done), 1),
                         "training_tokens_max": max(b["training_tokens"] for b in done)})
        result["rows"] = rows
        os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
        with open(args.out, "w") as f:
            json.dump(result, f, indent=1)
            f.write("\n")

    lock = threading.Lock()

    def run(job, build, subject):
        method, profile, ratio = build.split(":")
        with tempfile.NamedTemporaryFile(suffix=".json") as out:
            done = subprocess.run([args.program, "--model", args.model, *subject, "--methods", method, "--profiles", profile,
                                   "--ratios", ratio, "--max-questions", str(args.max_questions), "--threads", str(args.threads),
                                   "--device", args.device, "--gpu-weights", args.gpu_weights, "--output", out.name],
                                  env={**os.environ, **({"CUDA_VISIBLE_DEVICES": str(job % args.gpus)} if args.gpus > 1 else {})},
                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            if done.returncode != 0:
                print(f"{' '.join(subject)}, {build}: failed: {done.stderr[-500:]}", file=sys.stderr, flush=True)
                return False
            built = json.load(open(out.name))["rows"]
        with lock:
            result["builds"] += built
            b = built[-1]
            print(f"{b['document']:32} {method} {profile} {ratio}x: T {b['T']} p {b['p']} recovered {b['cache']['recovered']:.3f} "
                  f"(truncated {b['truncated']['recovered']:.3f}) kl {b['cache']['kl']:.4f} {b['seconds']:.0f} s", file=sys.stderr, flush=True)
            write()
        return True

    with ThreadPoolExecutor(args.parallel) as pool:
        jobs = [pool.submit(run, job, build, subject) for job, (build, subject) in enumerate(
            (b, s) for b in args.build for s in subjects)]
        ok = all([job.result() for job in jobs])
    for row in result["rows"]:
        print(f"{row['name']}: {row['ours']} (truncation {row['peer']}), goal {row['goal']}, kl {row['kl']}, {row['seconds']} s a build")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
